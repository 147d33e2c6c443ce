import sys,json,tempfile
sys.path.insert(0,'tests/trainers')
import toys,torch
from pathlib import Path
from safetensors.torch import load_file
sys.path.insert(0,'.')
from tests.trainers.test_shared_rows import jobs_of,last_checkpoint
root=Path(tempfile.mkdtemp())
for m in sys.argv[1].split(';'):
    jobs=jobs_of(root,m)
    try: codes=toys.run_jobs(jobs)
    except AssertionError as e: print(m,"FAILED",str(e)[-1800:]); continue
    t=toys.resumable_trainer(root/(m+"one"),batch_size=4,method=m,double=True); t.train()
    e=load_file(last_checkpoint(root/(m+"one"))/"model.safetensors")
    ls=json.load(open(last_checkpoint(root/(m+"one"))/"trainer_state.json"))["log_history"]
    for j in jobs:
        f=last_checkpoint(Path(j["output_dir"]))
        g=load_file(f/"model.safetensors")
        l2=json.load(open(f/"trainer_state.json"))["log_history"]
        print(m,f.name,j["processes"],j["context_parallel_size"],max(float((g[k]-e[k]).abs().max()) for k in e), [ (round(a["loss"],6),round(b["loss"],6)) for a,b in zip(ls,l2) if "loss" in a][-2:], flush=True)

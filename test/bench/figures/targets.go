package figures

// Target is a figure to beat.
type Target struct {
	Bound   float64
	AtLeast bool // a rate; otherwise the figure must be at most the bound
	Source  string
}

// Met says whether a figure beats the target.
func (t Target) Met(figure float64) bool {
	if t.AtLeast {
		return figure >= t.Bound
	}
	return figure <= t.Bound // NaN beats nothing
}

// The figures of the systems to beat were measured on a 2-core, 24 GiB virtual
// machine with an fsync of 0.18 ms; "of" says what share of them the bound is.
const (
	etcd    = "etcd 3.6, 3 members"
	kube    = "Kubernetes 1.36"
	kubelet = "kubelet 1.36, containerd, runc"
)

// Targets are the figures to beat by the key of their row.
var Targets = map[string]Target{
	"store put 1 p50":   {Bound: 1.5 * 0.97, Source: "1.5 of " + etcd + ": 0.97 ms"},
	"store put 64":      {Bound: 2 * 5050, AtLeast: true, Source: "2 of " + etcd + ": 5,050/s"},
	"store put 64 p99":  {Bound: 0.7 * 37, Source: "0.7 of " + etcd + ": 37 ms"},
	"store put 256":     {Bound: 2 * 8000, AtLeast: true, Source: "2 of " + etcd + ": 8,000/s"},
	"store put 256 p99": {Bound: 0.7 * 82, Source: "0.7 of " + etcd + ": 82 ms"},

	"create pod 1 p50":    {Bound: 0.5 * 3.8, Source: "0.5 of " + kube + ": 3.8 ms"},
	"create pod 64":       {Bound: 5 * 930, AtLeast: true, Source: "5 of " + kube + ": 930/s"},
	"create pod 64 p99":   {Bound: 0.25 * 200, Source: "0.25 of " + kube + ": 200 ms"},
	"create configmap 64": {Bound: 5 * 1130, AtLeast: true, Source: "5 of " + kube + ": 1,130/s"},
	"get pod 64":          {Bound: 5 * 2700, AtLeast: true, Source: "5 of " + kube + ": 2,700/s"},
	"list 10000 pods":     {Bound: 0.5 * 150, Source: "0.5 of " + kube + ": 150 ms"},

	"ready p50":        {Bound: 80, Source: kubelet + ": 178 ms"},
	"ready p99":        {Bound: 225, Source: kubelet + ": 225 ms"},
	"bound p50":        {Bound: 4, Source: kube + ": 7 ms"},
	"gone p50":         {Bound: 100, Source: kubelet + ": 1,630 ms"},
	"burst":            {Bound: 20, AtLeast: true, Source: kubelet + ", 50 pods: 5.4 to 8/s"},
	"burst p99":        {Bound: 2500, Source: kubelet + ", 50 pods: 6.2 to 9.2 s"},
	"pod pss":          {Bound: 2, Source: "containerd-shim and pause: 4.7 MiB"},
	"controlplane":     {Bound: 80, Source: kube + ": 461 MiB in four processes"},
	"agent with pods":  {Bound: 70, Source: "kubelet and containerd, 50 pods: 190 MiB"},
	"agent":            {Bound: 40, Source: "kubelet and containerd: 112 MiB"},
	"controlplane cpu": {Bound: 5, Source: "k3s server: 5 to 6% of a core"},
	"agent cpu":        {Bound: 3, Source: "k3s agent: 3% of a core"},
}

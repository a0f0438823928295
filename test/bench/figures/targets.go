package figures

import (
	"math"
	"strconv"
)

// Target is a bound for a figure.
type Target struct {
	Bound   float64
	AtLeast bool // for a rate; otherwise the figure must be at most the bound
	Source  string

	// Relative applies the bound to the ratio to the reference of the same run, not to the figure.
	Relative bool
}

// IsMet reports whether a figure meets the target.
func (t Target) IsMet(figure float64) bool {
	if t.AtLeast {
		return figure >= t.Bound
	}
	return figure <= t.Bound // NaN meets no target
}

// formatBound returns the bound with its sign and unit.
func (t Target) formatBound(unit string) string {
	sign := "≤ "
	if t.AtLeast {
		sign = "≥ "
	}
	if t.Relative {
		return sign + strconv.FormatFloat(math.Round(t.Bound*100)/100, 'f', -1, 64) + " times"
	}
	return sign + Format(t.Bound, unit)
}

// The figures of other systems were measured on a 2-core, 24 GiB virtual machine with an fsync of
// 0.18 ms. "0.5 of" such a figure means that the bound is half of it.
const (
	etcd    = "etcd 3.6, 3 members"
	kube    = "Kubernetes 1.36"
	kubelet = "kubelet 1.36, containerd, runc"

	floors   = "kube-scheduler's published floor (5,000 nodes, larger machines)"
	ownBound = "this project's own bound"
)

// Targets are the targets of the benchmarks, keyed by Row.Key.
var Targets = map[string]Target{
	"store put 1 p50_ms bolt": {Bound: 1.5, Relative: true, Source: etcd},
	"store put 1 p50_ms wal":  {Bound: 1, Relative: true, Source: etcd},
	"store put 64 rate":       {Bound: 2, AtLeast: true, Relative: true, Source: etcd},
	"store put 64 p99_ms":     {Bound: 0.7, Relative: true, Source: etcd},
	"store put 256 rate":      {Bound: 2, AtLeast: true, Relative: true, Source: etcd},
	"store put 256 p99_ms":    {Bound: 0.7, Relative: true, Source: etcd},

	"services full sync":       {Bound: 3000, Source: ownBound},
	"services change p50":      {Bound: 20, Source: ownBound},
	"services change p99":      {Bound: 50, Source: ownBound},
	"services memory":          {Bound: 120, Source: ownBound},
	"services stream":          {Bound: 0.95, AtLeast: true, Relative: true, Source: "pod to pod"},
	"services connections":     {Bound: 0.85, AtLeast: true, Relative: true, Source: "pod to pod"},
	"services stream cpu":      {Bound: 1 / 0.95, Relative: true, Source: "pod to pod"},
	"services connections cpu": {Bound: 1 / 0.85, Relative: true, Source: "pod to pod"},
	"services many cpu":        {Bound: 1 / 0.95, Relative: true, Source: "few Services"},
	"services many":            {Bound: 0.95, AtLeast: true, Relative: true, Source: "few Services"},

	"policies full sync":   {Bound: 3000, Source: ownBound},
	"policies stream":      {Bound: 0.95, AtLeast: true, Relative: true, Source: "no policies"},
	"policies connections": {Bound: 0.95, AtLeast: true, Relative: true, Source: "no policies"},
	"policies cpu":         {Bound: 1 / 0.95, Relative: true, Source: "no policies"},

	"dns per core": {Bound: 20000, AtLeast: true, Source: ownBound},
	"dns rate":     {Bound: 1, AtLeast: true, Relative: true, Source: "CoreDNS"},
	"dns p99_ms":   {Bound: 1, Relative: true, Source: "CoreDNS"},

	"storage fresh p50_ms": {Bound: 150, Source: ownBound},

	"scale rest writes":        {Bound: 0, Source: "an idle cluster writes nothing"},
	"scale call p99_ms":        {Bound: 1000, Source: "Kubernetes' objective for 5,000 nodes"},
	"deployment bound":         {Bound: 3, Source: ownBound + "; 19.4 s in Kubernetes 1.36, on 100 nodes"},
	"deployment gap step-down": {Bound: 1000, Source: ownBound},
	"deployment gap killed":    {Bound: 1700, Source: ownBound + ": a second and an election"},

	"store seen on followers after ack p99_ms":  {Bound: 2, Source: ownBound},
	"store transfer max_ms":                     {Bound: 50, Source: ownBound},
	"store transfer failed_calls":               {Bound: 0, Source: "calls wait"},
	"store shutdown of the leader max_ms":       {Bound: 50, Source: ownBound},
	"store shutdown of the leader failed_calls": {Bound: 0, Source: "calls wait"},
	"store install on a follower pause_ms":      {Bound: 50, Source: ownBound},
	"store kill p50_ms":                         {Bound: 100, Source: etcd + ": 1.2 to 1.5 s"},
	"store kill max_ms":                         {Bound: 300, Source: etcd + ": at most 1.7 s"},
	"store kill failed_calls":                   {Bound: 0, Source: "calls wait"},
	"failover writes":                           {Bound: 100, Source: ownBound + "; the longest 300"},
	"failover controller":                       {Bound: 200, Source: ownBound + ", after the election"},
	"failover binding":                          {Bound: 200, Source: ownBound + ", after the election"},
	"failover status":                           {Bound: 200, Source: ownBound + ", after the election"},
	"failover sessions":                         {Bound: 200, Source: ownBound + ", after the election"},
	"failover watches":                          {Bound: 200, Source: ownBound + ", after the election"},
	"failover none":                             {Bound: 0, Source: ownBound},

	"store freeze max_ms": {Bound: 700,
		Source: ownBound + ": silence of 600 ms and an election"},
	"store freeze failed_calls":                   {Bound: 0, Source: "calls wait"},
	"store busy elections":                        {Bound: 0, Source: ownBound},
	"store restart of a follower took_s":          {Bound: 10, Source: ownBound},
	"store restart of all took_s":                 {Bound: 10, Source: ownBound},
	"store snapshot by the leader pause_ms":       {Bound: 50, Source: ownBound},
	"store snapshot by all pause_ms":              {Bound: 50, Source: ownBound},
	"store snapshot by the leader memory_percent": {Bound: 10, Source: ownBound},
	"store snapshot by all memory_percent":        {Bound: 10, Source: ownBound},

	"create pod 1 p50":    {Bound: 0.5 * 3.8, Source: "0.5 of " + kube + ": 3.8 ms"},
	"create pod 64":       {Bound: 5 * 930, AtLeast: true, Source: "5 of " + kube + ": 930/s"},
	"create pod 64 p99":   {Bound: 0.25 * 200, Source: "0.25 of " + kube + ": 200 ms"},
	"create configmap 64": {Bound: 5 * 1130, AtLeast: true, Source: "5 of " + kube + ": 1,130/s"},
	"get pod 64":          {Bound: 5 * 2700, AtLeast: true, Source: "5 of " + kube + ": 2,700/s"},
	"list 10000 pods":     {Bound: 0.5 * 150, Source: "0.5 of " + kube + ": 150 ms"},

	"placement plain 1000":         {Bound: 3000, AtLeast: true, Source: ownBound},
	"placement spread 1000":        {Bound: 1000, AtLeast: true, Source: ownBound},
	"placement affinity 1000":      {Bound: 1000, AtLeast: true, Source: ownBound},
	"placement anti-affinity 1000": {Bound: 1000, AtLeast: true, Source: ownBound},
	"placement preferred 1000":     {Bound: 1000, AtLeast: true, Source: ownBound},
	"placement plain 5000":         {Bound: 2500, AtLeast: true, Source: ownBound},
	"placement spread 5000":        {Bound: 3 * 460, AtLeast: true, Source: "3 of " + floors + ": 460/s"},
	"placement node-affinity 5000": {Bound: 3 * 540, AtLeast: true, Source: "3 of " + floors + ": 540/s"},
	"placement anti-affinity 5000": {Bound: 3 * 180, AtLeast: true, Source: "3 of " + floors + ": 180/s"},
	"placement affinity 5000":      {Bound: 3 * 70, AtLeast: true, Source: "3 of " + floors + ": 70/s"},
	"bound ahead":                  {Bound: 3000, AtLeast: true, Source: ownBound},
	"all bound 1000":               {Bound: 8 * 253, AtLeast: true, Source: "8 of " + kube + ", 10,000 pods: 253/s"},

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

package policy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/cni"
	"keelson.dev/keelson/internal/nftables"
	"keelson.dev/keelson/internal/wakeup"
)

// Config is the configuration of an Enforcer. All fields are required.
type Config struct {
	Objects agent.Objects
	// Sandboxes is queried once for the addresses of pods that are already running.
	Sandboxes Sandboxes
	// Disabled reports whether the agent must not enforce policies, because a third-party network
	// plugin attaches the pods or the operator disabled enforcement. The table is then removed.
	Disabled func() bool
	Log      *slog.Logger
}

// Sandboxes is the part of agent.Runtime that returns the addresses of pods.
type Sandboxes interface {
	ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error)
	PodSandboxStatus(context.Context, *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error)
}

// Enforcer enforces the NetworkPolicies on the pods of this node with nftables rules. It implements
// agent.PolicyGuard.
type Enforcer struct {
	cfg      Config
	wake     wakeup.Signal // signaled when pod addresses have changed
	policies policyCache
	interval time.Duration // between checks

	mu             sync.Mutex
	owners         map[netip.Addr]types.UID // the pod that has an address
	addresses      map[types.UID][]netip.Addr
	wantedVersion  uint64          // incremented with every change of owners
	appliedVersion uint64          // version of owners that the kernel's rules reflect
	revision       uint64          // the kernel's rules reflect at least this revision of the view
	waiters        int             // number of waiting Guard calls
	progress       chan struct{}   // closed and replaced when appliedVersion or reason changes
	programmed     map[string]bool // addresses with rules in the kernel that this process wrote
	unmergedSets   int             // number of sets that exceeded the limit and were not merged
	reason         string          // why the kernel's rules are not current, for the error of Guard
}

var _ agent.PolicyGuard = (*Enforcer)(nil)

// New returns an Enforcer. Nothing is enforced until Run is called.
func New(c Config) *Enforcer {
	return &Enforcer{cfg: c, wake: wakeup.New(), interval: checkInterval, owners: map[netip.Addr]types.UID{},
		addresses: map[types.UID][]netip.Addr{},
		progress:  make(chan struct{}), reason: "the rules of network policies have not been written yet"}
}

// Intervals and timeouts of Enforcer.Run and Enforcer.Guard.
const (
	// between checks whether enforcement is disabled and whether another program changed nftables
	checkInterval   = 5 * time.Second
	checkCostFactor = 50               // reading the table takes at most 1/50 of a CPU
	nftLimit        = 30 * time.Second // per transaction
	guardLimit      = 10 * time.Second // for the rules to be in place before a container starts
	sandboxWait     = time.Minute      // for listing the addresses of running pods
)

// Guard waits until the kernel enforces the policies that select the pod, for the pod's addresses.
// It returns an error if that takes longer than guardLimit. It returns nil at once for a pod on the
// host network, for a pod without policies, or if enforcement is disabled. It must be called before
// the pod's containers start. It implements agent.PolicyGuard.
func (e *Enforcer) Guard(ctx context.Context, pod *v1.Pod, addresses []string) error {
	if pod.Spec.HostNetwork {
		return nil
	}
	own := parseAddresses(addresses)
	e.mu.Lock()
	moved := e.setAddresses(pod.UID, own)
	want := e.wantedVersion
	stale := slices.ContainsFunc(own, func(a netip.Addr) bool { return e.programmed[a.String()] })
	e.mu.Unlock()
	if moved {
		e.wakeUp()
	}
	if e.cfg.Disabled() || !stale && !e.isSelected(pod) {
		return nil
	}
	return e.waitApplied(ctx, want)
}

// waitApplied waits until the kernel's rules reflect the given version of owners, the pods'
// addresses. It returns an error with the reason if ctx ends first.
func (e *Enforcer) waitApplied(ctx context.Context, version uint64) error {
	ctx, cancel := context.WithTimeout(ctx, guardLimit)
	defer cancel()
	waiting := false
	defer func() {
		e.mu.Lock()
		if waiting {
			e.waiters--
		}
		e.mu.Unlock()
	}()
	for {
		e.mu.Lock()
		shown, moved, why := e.appliedVersion >= version, e.progress, e.reason
		if !shown && !waiting {
			e.waiters++
			waiting = true
			e.wakeUp()
		}
		e.mu.Unlock()
		if shown {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fmt.Errorf("the network policies of the pod are not in force on this node after %s: %s",
					guardLimit, why)
			}
			return ctx.Err()
		}
	}
}

func (e *Enforcer) wakeUp() {
	e.wake.Send()
}

// isSelected reports whether a NetworkPolicy in the node's view selects the pod.
func (e *Enforcer) isSelected(pod *v1.Pod) bool {
	for _, p := range e.cfg.Objects.NetworkPolicies() {
		if p.Namespace != pod.Namespace {
			continue
		}
		if r := e.policies.parsePolicy(p, e.cfg.Log); r != nil && r.selectsPod(pod.Namespace, pod.Labels) {
			return true
		}
	}
	return false
}

func parseAddresses(addresses []string) []netip.Addr {
	var out []netip.Addr
	for _, s := range addresses {
		if a, err := netip.ParseAddr(s); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// setAddresses records the addresses of the pod with this UID, and reports whether they changed. An
// address of another pod is removed from that pod. The caller holds the lock.
func (e *Enforcer) setAddresses(uid types.UID, addresses []netip.Addr) (moved bool) {
	if slices.Equal(e.addresses[uid], addresses) {
		return false
	}
	e.removePod(uid)
	for _, a := range addresses {
		if before, ok := e.owners[a]; ok {
			e.addresses[before] = slices.DeleteFunc(slices.Clone(e.addresses[before]), func(b netip.Addr) bool {
				return a == b
			})
		}
		e.owners[a] = uid
	}
	e.addresses[uid] = slices.Clone(addresses)
	e.wantedVersion++
	return true
}

// removePod removes the pod with this UID and its addresses. The caller holds the lock.
func (e *Enforcer) removePod(uid types.UID) {
	for _, a := range e.addresses[uid] {
		delete(e.owners, a)
	}
	delete(e.addresses, uid)
}

// addRunningPods records the addresses of the pods that an earlier agent process started and that
// still run.
func (e *Enforcer) addRunningPods(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, sandboxWait)
	defer cancel()
	res, err := e.cfg.Sandboxes.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return fmt.Errorf("network policies: listing sandboxes: %w", err)
	}
	for _, s := range res.GetItems() {
		if s.State != cri.PodSandboxState_SANDBOX_READY {
			continue
		}
		st, err := e.cfg.Sandboxes.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: s.Id})
		if err != nil {
			continue // the sandbox was removed in the meantime
		}
		if st.GetStatus().GetLinux().GetNamespaces().GetOptions().GetNetwork() == cri.NamespaceMode_NODE {
			continue
		}
		addresses := []string{st.GetStatus().GetNetwork().GetIp()}
		for _, more := range st.GetStatus().GetNetwork().GetAdditionalIps() {
			addresses = append(addresses, more.GetIp())
		}
		uid := types.UID(s.Labels[agent.LabelPodUID])
		e.mu.Lock()
		if _, known := e.addresses[uid]; !known { // a call of Guard has recorded newer addresses
			e.setAddresses(uid, parseAddresses(addresses))
		}
		e.mu.Unlock()
	}
	return nil
}

// Run keeps the kernel's rules in sync with the policies, address groups and pods in the node's
// view, until ctx ends or an error occurs. It starts by rebuilding the table. The rules remain in
// the kernel when Run returns. Rules of an earlier process remain until a control plane has
// confirmed the view.
func (e *Enforcer) Run(ctx context.Context) error {
	nft, err := knftables.New(knftables.InetFamily, Table)
	if err != nil {
		e.setReason("nftables is not usable: " + err.Error())
		return fmt.Errorf("network policies need nftables: %w: install nft and a kernel with nf_tables", err)
	}
	changes := e.cfg.Objects.Follow(ctx, "NetworkPolicy", "AddressGroup", "Pod")
	t := &enforcerRun{e: e, nft: nft, generation: nftables.Generation, listTable: listTable,
		filterBridges: filterBridges}
	if err := e.addRunningPods(ctx); err != nil {
		return err
	}
	if err := t.programChanges(ctx, changes); err != nil && ctx.Err() == nil {
		e.setReason(err.Error())
		return fmt.Errorf("programming network policies: %w", err)
	}
	return ctx.Err()
}

// setReason sets the reason with which Guard fails if the rules are not in the kernel in time.
func (e *Enforcer) setReason(reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.reason = reason
}

// recordApplied records that the kernel has the rules r. They reflect the given version of owners
// and the given revision of the view. It wakes waiting Guard calls.
func (e *Enforcer) recordApplied(version, revision uint64, r ruleset) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.appliedVersion, e.revision, e.reason = version, revision, "the last change is being written"
	e.unmergedSets, e.programmed = r.unmergedSets, map[string]bool{}
	for _, m := range r.maps {
		for a := range m {
			e.programmed[a] = true
		}
	}
	close(e.progress)
	e.progress = make(chan struct{})
}

// podsWithAddresses returns the pods of the view that have addresses and are not on the host
// network, and the version of the recorded addresses. confirmed means that a control plane has
// confirmed the view. Recorded pods that such a view lacks are removed. If the view is not
// confirmed, unknown reports whether such pods exist.
func (e *Enforcer) podsWithAddresses(confirmed bool) (pods []Pod, version uint64, unknown bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	// The view must be read with the lock held. It then contains every pod that Guard has recorded.
	// With an older view such a pod would be removed, and would run without its policies.
	view := map[types.UID]*v1.Pod{}
	for _, p := range e.cfg.Objects.Pods() {
		view[p.UID] = p
	}
	for uid, addresses := range e.addresses {
		p, ok := view[uid]
		switch {
		case !ok && confirmed:
			e.removePod(uid)
		case !ok:
			unknown = true
		case !p.Spec.HostNetwork && len(addresses) > 0:
			pods = append(pods, newPod(p, addresses))
		}
	}
	slices.SortFunc(pods, func(a, b Pod) int { return a.Addresses[0].Compare(b.Addresses[0]) })
	return pods, e.wantedVersion, unknown
}

// hasWaiters reports whether a call of Guard is waiting for the kernel's rules.
func (e *Enforcer) hasWaiters() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.waiters > 0
}

// policyCache caches parsed NetworkPolicies by API object. Objects are never modified, so a parsed
// policy is valid as long as the view contains the same pointer.
type policyCache struct {
	mu     sync.Mutex
	parsed map[string]readPolicy
}

type readPolicy struct {
	object *networkingv1.NetworkPolicy
	policy *policy // nil: its podSelector cannot be parsed
}

// parsePolicy returns the parsed form of a NetworkPolicy, from the cache if possible. It logs the
// parts that cannot be parsed, once per object.
func (r *policyCache) parsePolicy(p *networkingv1.NetworkPolicy, log *slog.Logger) *policy {
	key := p.Namespace + "/" + p.Name
	r.mu.Lock()
	defer r.mu.Unlock()
	if was, ok := r.parsed[key]; ok && was.object == p {
		return was.policy
	}
	out, err := parsePolicy(p)
	if err != nil {
		log.Warn("a part of a network policy is invalid and allows nothing", "err", err)
	}
	if r.parsed == nil {
		r.parsed = map[string]readPolicy{}
	}
	r.parsed[key] = readPolicy{p, out}
	return out
}

// parseAll returns the parsed forms of all policies, and removes all other policies from the cache.
func (r *policyCache) parseAll(objects []*networkingv1.NetworkPolicy, log *slog.Logger) []*policy {
	var out []*policy
	keep := make(map[string]bool, len(objects))
	for _, p := range objects {
		keep[p.Namespace+"/"+p.Name] = true
		if one := r.parsePolicy(p, log); one != nil {
			out = append(out, one)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for key := range r.parsed {
		if !keep[key] {
			delete(r.parsed, key)
		}
	}
	return out
}

// filterBridges makes the kernel apply IP rules to traffic between pods on the same bridge, in both
// address families.
func filterBridges() error {
	for _, f := range []string{"/proc/sys/net/bridge/bridge-nf-call-iptables",
		"/proc/sys/net/bridge/bridge-nf-call-ip6tables"} {
		raw, err := os.ReadFile(f)
		if err == nil && len(raw) > 0 && raw[0] == '1' {
			continue
		}
		if err := os.WriteFile(f, []byte("1"), 0o644); err != nil {
			return fmt.Errorf("enabling the filtering of traffic between pods: %w: load it with 'modprobe "+
				"br_netfilter'", err)
		}
	}
	return nil
}

// bridge is the interface to which Keelson's network attaches pods.
const bridge = cni.Bridge

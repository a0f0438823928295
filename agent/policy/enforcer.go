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
)

// Config is what an Enforcer needs. All fields are required.
type Config struct {
	Objects agent.Objects
	// Sandboxes is asked once for the addresses of the pods that run already.
	Sandboxes Sandboxes
	// Off says that policies are not our affair: a network product attaches the pods, or the operator does not want it.
	// Our table is taken away then.
	Off func() bool
	Log *slog.Logger
}

// Sandboxes is the part of agent.Runtime that knows pods' addresses.
type Sandboxes interface {
	ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error)
	PodSandboxStatus(context.Context, *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error)
}

// Enforcer keeps the node's policies in force. It implements agent.PolicyGuard.
type Enforcer struct {
	cfg   Config
	wake  chan struct{} // buffered: addresses have changed
	read  reading
	every time.Duration // between looks without cause

	mu       sync.Mutex
	owners   map[netip.Addr]types.UID // whose an address is
	of       map[types.UID][]netip.Addr
	asked    uint64          // counts changes of owners
	shown    uint64          // of which the kernel knows
	revision uint64          // of the view that the kernel shows at least
	awaited  int             // how many wait
	moved    chan struct{}   // closed and replaced when shown or why change
	kernel   map[string]bool // addresses that have rules in the kernel, as far as this process wrote them
	split    int             // sets that the kernel had no room for
	why      string          // the kernel does not know more, while somebody waits
}

var _ agent.PolicyGuard = (*Enforcer)(nil)

// New returns an Enforcer that does nothing until Run.
func New(c Config) *Enforcer {
	return &Enforcer{cfg: c, wake: make(chan struct{}, 1), every: lookEvery, owners: map[netip.Addr]types.UID{}, of: map[types.UID][]netip.Addr{},
		moved: make(chan struct{}), why: "network policies are not programmed yet"}
}

// The bounds of Run and Guard in time.
const (
	lookEvery   = 5 * time.Second  // between looks at whose affair policies are, and at whether anybody changed nftables
	lookShare   = 50               // the table is read for one part in so many of a processor's time at most
	nftLimit    = 30 * time.Second // for one transaction
	guardLimit  = 10 * time.Second // for rules to be in force before a container is started
	sandboxWait = time.Minute      // for the addresses of what runs
)

// Guard implements agent.PolicyGuard.
func (e *Enforcer) Guard(ctx context.Context, pod *v1.Pod, addresses []string) error {
	if pod.Spec.HostNetwork {
		return nil
	}
	own := parse(addresses)
	e.mu.Lock()
	moved := e.attach(pod.UID, own)
	want := e.asked
	stale := slices.ContainsFunc(own, func(a netip.Addr) bool { return e.kernel[a.String()] })
	e.mu.Unlock()
	if moved {
		e.poke()
	}
	if e.cfg.Off() || !stale && !e.selected(pod) {
		return nil
	}
	return e.await(ctx, want)
}

// await returns once the kernel shows what was asked for.
func (e *Enforcer) await(ctx context.Context, want uint64) error {
	ctx, cancel := context.WithTimeout(ctx, guardLimit)
	defer cancel()
	waiting := false
	defer func() {
		e.mu.Lock()
		if waiting {
			e.awaited--
		}
		e.mu.Unlock()
	}()
	for {
		e.mu.Lock()
		shown, moved, why := e.shown >= want, e.moved, e.why
		if !shown && !waiting {
			e.awaited++
			waiting = true
			e.poke()
		}
		e.mu.Unlock()
		if shown {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fmt.Errorf("the network policies of the pod are not in force on this node after %s: %s", guardLimit, why)
			}
			return ctx.Err()
		}
	}
}

func (e *Enforcer) poke() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// selected says whether a policy of the view selects the pod.
func (e *Enforcer) selected(pod *v1.Pod) bool {
	for _, p := range e.cfg.Objects.NetworkPolicies() {
		if p.Namespace != pod.Namespace {
			continue
		}
		if r := e.read.policy(p, e.cfg.Log); r != nil && r.selects(pod.Namespace, pod.Labels) {
			return true
		}
	}
	return false
}

func parse(addresses []string) []netip.Addr {
	var out []netip.Addr
	for _, s := range addresses {
		if a, err := netip.ParseAddr(s); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// attach notes whose addresses these are. An address has one owner: the one who got it last. The lock is held.
func (e *Enforcer) attach(uid types.UID, addresses []netip.Addr) (moved bool) {
	if slices.Equal(e.of[uid], addresses) {
		return false
	}
	e.detach(uid)
	for _, a := range addresses {
		if before, ok := e.owners[a]; ok {
			e.of[before] = slices.DeleteFunc(slices.Clone(e.of[before]), func(b netip.Addr) bool { return a == b })
		}
		e.owners[a] = uid
	}
	e.of[uid] = slices.Clone(addresses)
	e.asked++
	return true
}

// detach forgets a pod. The lock is held.
func (e *Enforcer) detach(uid types.UID) {
	for _, a := range e.of[uid] {
		delete(e.owners, a)
	}
	delete(e.of, uid)
}

// adopt asks for the addresses of the pods that run since before this process.
func (e *Enforcer) adopt(ctx context.Context) error {
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
			continue // it went meanwhile
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
		if _, known := e.of[uid]; !known { // by a Guard, which knows newer ones
			e.attach(uid, parse(addresses))
		}
		e.mu.Unlock()
	}
	return nil
}

// Run keeps the kernel at what the view says until ctx ends or that fails; Run again makes the table anew. Rules stay
// when it ends, and until the view is known to be whole those of an earlier life stay in force.
func (e *Enforcer) Run(ctx context.Context) error {
	nft, err := knftables.New(knftables.InetFamily, Table)
	if err != nil {
		e.say("nftables does not work: " + err.Error())
		return fmt.Errorf("network policies need nftables: %w: install nft and a kernel with nf_tables", err)
	}
	changes := e.cfg.Objects.Follow(ctx, "NetworkPolicy", "AddressGroup", "Pod")
	t := &turn{e: e, nft: nft, generation: nftables.Generation, listed: listTable, bridges: filterBridges}
	if err := e.adopt(ctx); err != nil {
		return err
	}
	if err := t.follow(ctx, changes); err != nil && ctx.Err() == nil {
		e.say(err.Error())
		return fmt.Errorf("programming network policies: %w", err)
	}
	return ctx.Err()
}

// say tells those who wait why.
func (e *Enforcer) say(why string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.why = why
}

// show tells those who wait that the kernel knows what was asked for up to a change.
func (e *Enforcer) show(asked, revision uint64, r ruleset) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.shown, e.revision, e.why = asked, revision, "the last change is being programmed"
	e.split, e.kernel = r.split, map[string]bool{}
	for _, m := range r.maps {
		for a := range m {
			e.kernel[a] = true
		}
	}
	close(e.moved)
	e.moved = make(chan struct{})
}

// pods are those of the view that have addresses. What has left the view is forgotten, once the view is certain.
func (e *Enforcer) pods(certain bool) (pods []Pod, asked uint64, strangers bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	// Read with the lock: a pod of which Guard was told before is in it, and one that comes meanwhile is asked for anew. Against an
	// older view it would be forgotten, and be without its policies for as long as it runs.
	view := map[types.UID]*v1.Pod{}
	for _, p := range e.cfg.Objects.Pods() {
		view[p.UID] = p
	}
	for uid, addresses := range e.of {
		p, ok := view[uid]
		switch {
		case !ok && certain:
			e.detach(uid)
		case !ok:
			strangers = true
		case !p.Spec.HostNetwork && len(addresses) > 0:
			pods = append(pods, podOf(p, addresses))
		}
	}
	slices.SortFunc(pods, func(a, b Pod) int { return a.Addresses[0].Compare(b.Addresses[0]) })
	return pods, e.asked, strangers
}

// wanted says that somebody waits.
func (e *Enforcer) wanted() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.awaited > 0
}

// reading remembers policies as they were read: objects are never changed in place.
type reading struct {
	mu  sync.Mutex
	was map[string]readPolicy
}

type readPolicy struct {
	object *networkingv1.NetworkPolicy
	policy *policy // nil: it selects nobody whom we could tell
}

// policy reads an object, and tells once of what cannot be read in it.
func (r *reading) policy(p *networkingv1.NetworkPolicy, log *slog.Logger) *policy {
	key := p.Namespace + "/" + p.Name
	r.mu.Lock()
	defer r.mu.Unlock()
	if was, ok := r.was[key]; ok && was.object == p {
		return was.policy
	}
	out, err := read(p)
	if err != nil {
		log.Warn("a part of a policy cannot be read, and lets nothing through", "err", err)
	}
	if r.was == nil {
		r.was = map[string]readPolicy{}
	}
	r.was[key] = readPolicy{p, out}
	return out
}

// all reads what there is, and forgets the rest.
func (r *reading) all(objects []*networkingv1.NetworkPolicy, log *slog.Logger) []*policy {
	var out []*policy
	keep := make(map[string]bool, len(objects))
	for _, p := range objects {
		keep[p.Namespace+"/"+p.Name] = true
		if one := r.policy(p, log); one != nil {
			out = append(out, one)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for key := range r.was {
		if !keep[key] {
			delete(r.was, key)
		}
	}
	return out
}

// filterBridges has the kernel show us what goes from pod to pod over the bridge, in both families.
func filterBridges() error {
	for _, f := range []string{"/proc/sys/net/bridge/bridge-nf-call-iptables", "/proc/sys/net/bridge/bridge-nf-call-ip6tables"} {
		raw, err := os.ReadFile(f)
		if err == nil && len(raw) > 0 && raw[0] == '1' {
			continue
		}
		if err := os.WriteFile(f, []byte("1"), 0o644); err != nil {
			return fmt.Errorf("having traffic between pods filtered: %w: load it with 'modprobe br_netfilter'", err)
		}
	}
	return nil
}

// bridge is what pods of our own network hang on.
const bridge = cni.Bridge

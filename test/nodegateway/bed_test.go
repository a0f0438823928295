// Package fleet_test puts the two sides of the fleet protocol together: agent/session against
// controlplane/nodegateway, over loopback and mTLS, with a registry over a store in memory.
package nodegateway_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// The clocks of the tests: a session is suspect after a second, a node lost a little later.
const (
	heartbeat = 100 * time.Millisecond
	suspect   = time.Second
	grace     = time.Second
	patience  = 3 * time.Minute // what takes longer on a busy machine has failed
)

// tokenKey is that of all beds.
var tokenKey = pki.TokenKey("a key of this test")

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// bed is a control plane of several replicas over one store.
type bed struct {
	clocks clocks
	t      *testing.T
	ctx    context.Context
	client *client.Client // as the administrator
	trust  *pki.ClusterCA
	pki    string // the folder of trust
	token  string
	wire   *wire
	// tokensWait is whether tokens that were made with the cluster are still to come.
	tokensWait atomic.Bool

	mu       sync.Mutex
	replicas map[string]*replica
	changed  map[string]chan struct{} // of what each replica says
	says     map[string][]string      // whom a replica names, where it is not all of them
	dead     map[string]bool
	certLife atomic.Int64
	ahead    atomic.Int64 // by how much the clock of those who sign is
	tokens   atomic.Int64 // service account tokens minted
	writes   atomic.Int64
	noLeases atomic.Bool   // session records cannot be written
	spends   atomic.Int64  // tries to take down uses of tokens
	cutOff   atomic.Int64  // of those who enrol: how often one asked again since the time of its connection was up
	last     atomic.Value  // what was written last, in words
	nodeIPs  []string      // what nodes that join have their server's certificate name; none: there is no server
	records  []auditRecord // of those who asked to join or to renew; guarded by mu
}

// auditRecord is what was asked for and what came of it; unfinished until then.
type auditRecord struct {
	nodegateway.Asked
	nodegateway.Answered
}

// audit records who asks to join or to renew.
func (b *bed) audit(a nodegateway.Asked) (func(nodegateway.Answered), error) {
	if strings.HasPrefix(a.Name, "unrecorded") && a.User.Name != api.UserAnonymous {
		return nil, errors.New("the disk is full")
	}
	return func(got nodegateway.Answered) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.records = append(b.records, auditRecord{a, got})
	}, nil
}

type replica struct {
	name     string
	address  string
	fleet    *nodegateway.Server
	timeline *api.Timeline
	stop     func()
}

func newBed(t *testing.T, names ...string) *bed {
	t.Helper()
	return newBedWith(t, clocks{heartbeat: heartbeat, suspect: suspect, grace: grace}, names...)
}

// clocks of a bed; zero is what production has.
type clocks struct{ heartbeat, suspect, grace, stopGate time.Duration }

// steady are clocks by which nobody is given up: a busy machine, or a hand-made agent that says nothing, ends no session.
var steady = clocks{heartbeat: heartbeat, suspect: time.Hour, grace: time.Hour}

func newBedWith(t *testing.T, with clocks, names ...string) *bed {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	store := storetest.NewMemory()
	table := kinds.All()
	reg := registry.New(store, table, registry.WithCompanions(&v1.Node{}, nodegateway.NodeCompanions))
	ended := make(chan error, 1)
	go func() { ended <- reg.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, raftstore.ErrClosed) && !errors.Is(err, context.Canceled) {
			t.Errorf("registry: %v", err)
		}
		store.Close()
	})
	<-reg.Ready()
	folder := filepath.Join(t.TempDir(), "pki")
	if _, err := pki.Init(folder, "test", time.Now()); err != nil {
		t.Fatal(err)
	}
	ca, err := pki.NewClusterCA(folder, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{
		t: t, ctx: ctx, clocks: with, trust: ca, pki: folder, wire: newWire(), changed: make(map[string]chan struct{}), says: make(map[string][]string),
		replicas: make(map[string]*replica), dead: make(map[string]bool),
	}
	b.client = client.New(backend{registry.Direct(reg), b}, table).As(api.User{Name: "admin", Groups: []string{api.GroupMasters}})
	for _, ns := range []string{"default", "kube-system", "kube-node-lease"} {
		b.create(&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
	}
	tok := pki.NewToken(pki.RoleNode, ca.Signs().Cert)
	b.create(tokenKey.Record(tok, pki.Grant{Expires: time.Now().Add(time.Hour), Uses: 1000}))
	b.token = tok.String()
	for _, n := range names {
		b.start(n)
	}
	return b
}

// backend adds to the bare registry what the apiserver would do: it mints tokens. It counts writes.
type backend struct {
	api.Backend
	b *bed
}

func (x backend) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if r.Verb != api.VerbGet && r.Verb != api.VerbList {
		x.b.writes.Add(1)
		if r.Verb == api.VerbUpdate && r.Kind.Resource == "secrets" {
			x.b.spends.Add(1)
		}
		x.b.last.Store(fmt.Sprintf("%s of %s %s/%s %s by %s", r.Verb, r.Kind.Resource, r.Namespace, r.Name, r.Subresource, r.User.Name))
	}
	if r.Verb == api.VerbUpdate && r.Kind.Resource == "leases" && x.b.noLeases.Load() {
		return nil, errors.New("the store is busy")
	}
	if r.Verb == api.VerbCreate && r.Kind.Virtual {
		if out, ok := reviewed(r.Object, r.User.Name); ok {
			return out, nil
		}
		return nil, errors.New("refused")
	}
	if r.Subresource != "token" {
		return x.Backend.Do(ctx, r)
	}
	req := r.Object.(*authenticationv1.TokenRequest)
	n := x.b.tokens.Add(1)
	req.Status.Token = fmt.Sprintf("token-%d-of-%s-for-%s-by-%s", n, r.Name, req.Spec.BoundObjectRef.Name, r.User.Name)
	req.Status.ExpirationTimestamp = metav1.NewTime(time.Now().Add(time.Duration(*req.Spec.ExpirationSeconds) * time.Second))
	return req, nil
}

// start runs a replica, again under the same address when it ran before.
func (b *bed) start(name string) *replica {
	b.t.Helper()
	b.mu.Lock()
	address := "127.0.0.1:0"
	if old := b.replicas[name]; old != nil {
		address = old.address
	}
	b.announce(name)
	b.mu.Unlock()
	var ln net.Listener
	b.eventually("the address of "+name, func() (err error) { // a connection of somebody may have its port just now
		ln, err = net.Listen("tcp", address)
		return err
	})
	ctx, cancel := context.WithCancel(b.ctx)
	informers := client.NewInformers(b.client)
	r := &replica{name: name, address: ln.Addr().String(), timeline: api.NewTimeline(256)}
	r.fleet = nodegateway.New(nodegateway.Config{
		Replica: name, Listener: ln, TLS: b.trust.Enrolment(pki.ReplicaServing(name, net.IPv4(127, 0, 0, 9), "127.0.0.1")),
		Client: b.client, Informers: informers,
		Cluster:  nodegateway.Cluster{Name: "test", ClusterCIDR: "10.0.0.0/16", ServiceCIDR: "10.96.0.0/16", Domain: "cluster.local"},
		TokenKey: tokenKey, TokensWait: b.tokensWait.Load,
		SignNode: func(node string, csr []byte, atLeast time.Time) ([]byte, error) {
			life := time.Duration(b.certLife.Swap(0))
			if life == 0 {
				life = 24 * time.Hour
			}
			return b.trust.SignAgent(csr, node, life, later(time.Now().Add(time.Duration(b.ahead.Load())), atLeast))
		},
		SignServing: func(node string, csr []byte, seen netip.Addr) ([]byte, error) {
			return b.trust.SignServing(csr, node, seen, time.Hour, time.Now())
		},
		CA:       b.trust,
		Replicas: func() ([]*fleetv1.Replica, <-chan struct{}) { return b.list(name) },
		Alive:    b.alive,
		Timeline: r.timeline,

		CertificateLife: 24 * time.Hour,
		Audit:           b.audit,
		Log:             slog.New(slog.NewTextHandler(testLog{b.t, name}, &slog.HandlerOptions{Level: slog.LevelDebug})),

		Heartbeat: b.clocks.heartbeat, Suspect: b.clocks.suspect, Grace: b.clocks.grace, StopGate: b.clocks.stopGate,
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := informers.Run(ctx); err != nil && ctx.Err() == nil {
			b.t.Errorf("informers of %s: %v", name, err)
		}
	})
	wg.Go(func() {
		if err := r.fleet.Run(ctx); err != nil && ctx.Err() == nil {
			b.t.Errorf("fleet of %s: %v", name, err)
		}
	})
	r.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	b.t.Cleanup(r.stop)
	b.mu.Lock()
	b.replicas[name] = r
	delete(b.dead, name)
	b.announce(slices.Collect(maps.Keys(b.replicas))...)
	b.mu.Unlock()
	return r
}

// kill stops a replica for good.
func (b *bed) kill(name string) {
	b.mu.Lock()
	r := b.replicas[name]
	b.dead[name] = true
	b.mu.Unlock()
	r.stop()
}

// announce has replicas tell of a changed list. The lock is held.
func (b *bed) announce(names ...string) {
	for _, name := range names {
		if c := b.changed[name]; c != nil {
			close(c)
		}
		b.changed[name] = make(chan struct{})
	}
}

// list is what a replica says of all of them.
func (b *bed) list(by string) ([]*fleetv1.Replica, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	named, own := b.says[by]
	var out []*fleetv1.Replica
	for _, r := range b.replicas {
		if !own || slices.Contains(named, r.name) {
			out = append(out, &fleetv1.Replica{Name: r.name, FleetAddress: r.address})
		}
	}
	return out, b.changed[by]
}

func (b *bed) alive(name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.replicas[name] != nil && !b.dead[name]
}

func (b *bed) addresses() []string {
	list, _ := b.list("")
	var out []string
	for _, r := range list {
		out = append(out, r.FleetAddress)
	}
	slices.Sort(out)
	return out
}

// holder is the replica that has the node's session; nil when none.
func (b *bed) holder(node string) *replica {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.replicas {
		if !b.dead[r.name] && r.fleet.Connected(node) {
			return r
		}
	}
	return nil
}

// held is the replica that has the node's session, once one has.
func (b *bed) held(node string) (r *replica) {
	b.t.Helper()
	b.eventually("session of "+node, func() error {
		if r = b.holder(node); r == nil {
			return errors.New("no replica has it")
		}
		return nil
	})
	return r
}

func (b *bed) create(o api.Object) {
	b.t.Helper()
	if err := b.tryCreate(o); err != nil {
		b.t.Fatalf("create %T %s: %v", o, o.GetName(), err)
	}
}

func (b *bed) tryCreate(o api.Object) error {
	var err error
	switch o := o.(type) {
	case *v1.Namespace:
		_, err = client.Create(b.ctx, b.client, o)
	case *v1.Secret:
		_, err = client.Create(b.ctx, b.client, o)
	case *v1.ConfigMap:
		_, err = client.Create(b.ctx, b.client, o)
	case *v1.Pod:
		_, err = client.Create(b.ctx, b.client, o)
	case *v1.Service:
		_, err = client.Create(b.ctx, b.client, o)
	default:
		err = fmt.Errorf("unknown %T", o)
	}
	return err
}

// pod makes a pod bound to a node.
func (b *bed) pod(name, node string, change func(*v1.Pod)) *v1.Pod {
	b.t.Helper()
	p := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       v1.PodSpec{NodeName: node, Containers: []v1.Container{{Name: "c", Image: "hello"}}},
	}
	if change != nil {
		change(p)
	}
	p, err := client.Create(b.ctx, b.client, p)
	if err != nil {
		b.t.Fatalf("create pod %s: %v", name, err)
	}
	return p
}

// eventually waits until cond is nil.
func (b *bed) eventually(what string, cond func() error) {
	b.t.Helper()
	b.within(patience, 2*time.Millisecond, what, cond)
}

func (b *bed) within(limit, every time.Duration, what string, cond func() error) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, limit)
	defer cancel()
	if err := wait.For(ctx, every, cond); err != nil {
		b.t.Fatalf("%s: %v", what, err)
	}
}

// ready is the status of a node's Ready condition.
func (b *bed) ready(node string) v1.ConditionStatus {
	n, err := client.Get[*v1.Node](b.ctx, b.client, "", node)
	if err != nil {
		return ""
	}
	for _, c := range n.Status.Conditions {
		if c.Type == v1.NodeReady {
			return c.Status
		}
	}
	return ""
}

func (b *bed) awaitReady(node string, want v1.ConditionStatus) {
	b.t.Helper()
	b.eventually("node "+node, b.isReady(node, want))
}

func (b *bed) isReady(node string, want v1.ConditionStatus) func() error {
	return func() error {
		if got := b.ready(node); got != want {
			return fmt.Errorf("Ready is %q, want %q", got, want)
		}
		return nil
	}
}

// node is a running agent's session.
type node struct {
	*session.Session
	name       string
	state, run string
	stop       func() error
	ended      chan struct{} // closed when Run has returned err
	err        error
	mayFail    bool
}

// join starts an agent's session; it enrols when state holds nothing.
func (b *bed) join(name string, serve agent.NodeServer) *node {
	b.t.Helper()
	dir := b.t.TempDir()
	n := &node{name: name, state: filepath.Join(dir, "state"), run: filepath.Join(dir, "run")}
	b.rejoin(n, serve, b.addresses())
	return n
}

// rejoin starts the session of a node again, with what is on its disk.
func (b *bed) rejoin(n *node, serve agent.NodeServer, servers []string) {
	b.t.Helper()
	facts := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: map[string]string{v1.LabelHostname: n.name}}}
	facts.Status.NodeInfo.KubeletVersion = "v1.37.0"
	n.Session = session.New(session.Config{
		NodeName: n.name, Servers: servers, Token: b.token, StateDir: n.state, RunDir: n.run,
		Facts: facts, Server: serve, Dial: b.wire.dial, HTTPS: len(b.nodeIPs) > 0, NodeIPs: b.nodeIPs,
		Log:             slog.New(slog.NewTextHandler(testLog{b.t, n.name}, &slog.HandlerOptions{Level: slog.LevelDebug})),
		CheckpointEvery: 50 * time.Millisecond,
	})
	if d, ok := serve.(agent.DriverCalls); ok {
		n.Session.ServeDrivers(d)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	n.ended = ended
	s := n.Session
	go func() { n.err = s.Run(ctx); close(ended) }()
	n.stop = sync.OnceValue(func() error {
		cancel()
		<-ended
		if errors.Is(n.err, context.Canceled) {
			return nil
		}
		return n.err
	})
	stop := n.stop
	b.t.Cleanup(func() {
		if err := stop(); err != nil && !n.mayFail {
			b.t.Errorf("session of %s: %v", n.name, err)
		}
	})
}

func (n *node) awaitPod(b *bed, uid types.UID) *v1.Pod {
	b.t.Helper()
	b.eventually(fmt.Sprintf("pod on %s", n.name), func() error {
		if _, ok := n.Pod(uid); !ok {
			return errors.New("the agent does not have it")
		}
		return nil
	})
	p, _ := n.Pod(uid)
	return p
}

// wire is the network between agents and replicas: it can lose everything of a connection without closing it.
type wire struct {
	mu    sync.Mutex
	cut   map[string]bool // address
	conns map[*wireConn]bool
	dials int
	sent  atomic.Int64 // how often anything was written
}

func newWire() *wire { return &wire{cut: make(map[string]bool), conns: make(map[*wireConn]bool)} }

func (w *wire) dial(ctx context.Context, address string) (net.Conn, error) {
	w.mu.Lock()
	cut := w.cut[address]
	w.dials++
	w.mu.Unlock()
	if cut { // packets vanish: the caller waits until it gives up
		<-ctx.Done()
		return nil, ctx.Err()
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	wc := &wireConn{Conn: c, wire: w, address: address, lost: make(chan struct{})}
	w.mu.Lock()
	w.conns[wc] = true
	w.mu.Unlock()
	return wc, nil
}

// lose cuts an address: what is connected hears nothing more and what is sent vanishes.
func (w *wire) lose(address string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut[address] = true
	for c := range w.conns {
		if c.address == address {
			c.once.Do(func() { close(c.lost) })
		}
	}
}

func (w *wire) heal(address string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.cut, address)
}

type wireConn struct {
	net.Conn
	wire    *wire
	address string
	once    sync.Once
	lost    chan struct{}
}

func (c *wireConn) isLost() bool {
	select {
	case <-c.lost:
		return true
	default:
		return false
	}
}

func (c *wireConn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.isLost() {
			return n, err
		}
	}
}

func (c *wireConn) Write(p []byte) (int, error) {
	if c.isLost() {
		return len(p), nil
	}
	c.wire.sent.Add(1)
	return c.Conn.Write(p)
}

// testLog writes to the test's log while it runs.
type testLog struct {
	t   *testing.T
	who string
}

func (l testLog) Write(p []byte) (int, error) {
	if os.Getenv("KEELSON_TEST_LOG") != "" {
		fmt.Fprintf(os.Stderr, "%-4s %s", l.who, p)
	}
	return len(p), nil
}

var _ io.Writer = testLog{}

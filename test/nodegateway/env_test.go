// Package fleet_test puts the two sides of the fleet protocol together: agent/session against
// controlplane/nodegateway, over loopback and mTLS, with a registry over a store in memory.
package nodegateway_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
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
	"keelson.dev/keelson/controlplane/nodegateway/accept"
	gatewaysession "keelson.dev/keelson/controlplane/nodegateway/session"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/controlplane/registry/registrytest"
	"keelson.dev/keelson/internal/await"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// The clocks of the tests: a session is suspect after a second, a node lost a little later.
const (
	heartbeat = 100 * time.Millisecond
	suspect   = time.Second
	grace     = time.Second
	patience  = 3 * time.Minute // a longer wait is a failure, also on a busy machine
)

// tokenKey is that of all beds.
var tokenKey = pki.TokenKey("a key of this test")

func maxTime(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// testEnv is a control plane of several replicas over one store.
type testEnv struct {
	clocks  timeouts
	t       *testing.T
	ctx     context.Context
	client  *client.Client // as the administrator
	trust   *pki.ClusterCA
	pki     string // the folder of trust
	token   string
	network *testNetwork
	// tokensPending is whether tokens that were made with the cluster are still to come.
	tokensPending atomic.Bool

	mu            sync.Mutex
	replicas      map[string]*replica
	changed       map[string]chan struct{} // signaled when the list of a replica changes
	listed        map[string][]string      // replicas that one replica lists, if these are not all of them
	dead          map[string]bool
	certLife      atomic.Int64
	signerAhead   atomic.Int64 // how far the clock of the signing replicas is ahead
	tokens        atomic.Int64 // service account tokens minted
	writes        atomic.Int64
	failLeases    atomic.Bool  // session records cannot be written
	tokenUses     atomic.Int64 // tries to take down uses of tokens
	enrollRetries atomic.Int64 // number of enrollments that were repeated because the connection's time was over
	lastWrite     atomic.Value // description of the last write
	// addresses in the server certificates of joining nodes; none = the nodes have no server
	nodeIPs []string
	records []auditRecord // records of requests to join or to renew; guarded by mu
}

// auditRecord is a request and its result, which is not set before the request has ended.
type auditRecord struct {
	accept.AuditRequest
	accept.AuditResult
}

// recordAudit records a request to join or to renew.
func (b *testEnv) recordAudit(a accept.AuditRequest) (func(accept.AuditResult), error) {
	if strings.HasPrefix(a.Name, "unrecorded") && a.User.Name != api.UserAnonymous {
		return nil, errors.New("the disk is full")
	}
	return func(got accept.AuditResult) {
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

func newTestEnv(t *testing.T, names ...string) *testEnv {
	t.Helper()
	return newTestEnvWith(t, timeouts{heartbeat: heartbeat, suspect: suspect, grace: grace}, names...)
}

// timeouts are the timeouts of a testEnv; zero is the production value.
type timeouts struct{ heartbeat, suspect, grace, stopGate time.Duration }

// steady are timeouts with which no node is declared lost: neither a busy machine nor a silent gRPC
// client ends a session.
var steady = timeouts{heartbeat: heartbeat, suspect: time.Hour, grace: time.Hour}

func newTestEnvWith(t *testing.T, with timeouts, names ...string) *testEnv {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	store := storetest.NewMemory()
	table := kinds.All()
	reg := registry.New(store, table, registry.WithCompanions(&v1.Node{}, accept.NodeCompanions))
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
	b := &testEnv{
		t: t, ctx: ctx, clocks: with, trust: ca, pki: folder, network: newTestNetwork(),
		changed:  make(map[string]chan struct{}),
		listed:   make(map[string][]string),
		replicas: make(map[string]*replica), dead: make(map[string]bool),
	}
	b.client = client.New(backend{registrytest.NewBackend(reg), b}, table).As(api.User{Name: "admin",
		Groups: []string{api.GroupMasters}})
	for _, ns := range []string{"default", "kube-system", "kube-node-lease"} {
		b.createObject(&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
	}
	tok := pki.NewToken(pki.RoleNode, ca.SigningCA().Cert)
	b.createObject(tokenKey.Record(tok, pki.Grant{Expires: time.Now().Add(time.Hour), Uses: 1000}))
	b.token = tok.String()
	for _, n := range names {
		b.startReplica(n)
	}
	return b
}

// backend adds the API server's part to the bare registry: it mints tokens. It counts writes.
type backend struct {
	api.Backend
	b *testEnv
}

func (x backend) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if r.Verb != api.VerbGet && r.Verb != api.VerbList {
		x.b.writes.Add(1)
		if r.Verb == api.VerbUpdate && r.Kind.Resource == "secrets" {
			x.b.tokenUses.Add(1)
		}
		x.b.lastWrite.Store(fmt.Sprintf("%s of %s %s/%s %s by %s", r.Verb, r.Kind.Resource, r.Namespace, r.Name,
			r.Subresource, r.User.Name))
	}
	if r.Verb == api.VerbUpdate && r.Kind.Resource == "leases" && x.b.failLeases.Load() {
		return nil, errors.New("the store is busy")
	}
	if r.Verb == api.VerbCreate && r.Kind.Serving.Virtual {
		if out, ok := reviewRequest(r.Object, r.User.Name); ok {
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
	req.Status.ExpirationTimestamp = metav1.NewTime(
		time.Now().Add(time.Duration(*req.Spec.ExpirationSeconds) * time.Second))
	return req, nil
}

// startReplica runs a replica, under the same address if it ran before.
func (b *testEnv) startReplica(name string) *replica {
	b.t.Helper()
	b.mu.Lock()
	address := "127.0.0.1:0"
	if old := b.replicas[name]; old != nil {
		address = old.address
	}
	b.signalChange(name)
	b.mu.Unlock()
	var ln net.Listener
	b.awaitCondition("the address of "+name, func() (err error) { // another connection may have its port at the moment
		ln, err = net.Listen("tcp", address)
		return err
	})
	ctx, cancel := context.WithCancel(b.ctx)
	informers := client.NewInformers(b.client)
	r := &replica{name: name, address: ln.Addr().String(), timeline: api.NewTimeline(256)}
	r.fleet = nodegateway.New(nodegateway.Config{
		Replica: name, Listen: nodegateway.ListenConfig{Listener: ln,
			TLS: b.trust.EnrollmentTLS(pki.ReplicaServing(name, net.IPv4(127, 0, 0, 9), "127.0.0.1"))},
		Client: b.client, Informers: informers,
		Cluster: gatewaysession.Cluster{Name: "test", ClusterCIDR: "10.0.0.0/16", ServiceCIDR: "10.96.0.0/16",
			Domain: "cluster.local"},
		Enroll: accept.EnrollConfig{
			TokenKey: tokenKey, TokensPending: b.tokensPending.Load,
			SignNode: func(node string, csr []byte, atLeast time.Time) ([]byte, error) {
				life := time.Duration(b.certLife.Swap(0))
				if life == 0 {
					life = 24 * time.Hour
				}
				return b.trust.SignAgent(csr, node, life,
					maxTime(time.Now().Add(time.Duration(b.signerAhead.Load())), atLeast))
			},
			SignServing: func(node string, csr []byte, seen netip.Addr) ([]byte, error) {
				return b.trust.SignServing(csr, node, seen, time.Hour, time.Now())
			},
			CertificateLife: 24 * time.Hour,
			Audit:           b.recordAudit,
		},
		CA: b.trust,
		Replicas: nodegateway.ReplicasConfig{
			List:    func() ([]*fleetv1.Replica, <-chan struct{}) { return b.listReplicas(name) },
			IsAlive: b.isAlive,
		},
		Timeline: r.timeline,
		Log:      slog.New(slog.NewTextHandler(testLog{b.t, name}, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Timing: nodegateway.Timing{Heartbeat: b.clocks.heartbeat, Suspect: b.clocks.suspect, Grace: b.clocks.grace,
			StopGate: b.clocks.stopGate},
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
	b.signalChange(slices.Collect(maps.Keys(b.replicas))...)
	b.mu.Unlock()
	return r
}

// stopReplica stops a replica permanently.
func (b *testEnv) stopReplica(name string) {
	b.mu.Lock()
	r := b.replicas[name]
	b.dead[name] = true
	b.mu.Unlock()
	r.stop()
}

// signalChange makes replicas report a changed list of replicas. The caller holds the lock.
func (b *testEnv) signalChange(names ...string) {
	for _, name := range names {
		if c := b.changed[name]; c != nil {
			close(c)
		}
		b.changed[name] = make(chan struct{})
	}
}

// listReplicas returns the list of replicas as reported by one replica.
func (b *testEnv) listReplicas(by string) ([]*fleetv1.Replica, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	named, own := b.listed[by]
	var out []*fleetv1.Replica
	for _, r := range b.replicas {
		if !own || slices.Contains(named, r.name) {
			out = append(out, &fleetv1.Replica{Name: r.name, FleetAddress: r.address})
		}
	}
	return out, b.changed[by]
}

func (b *testEnv) isAlive(name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.replicas[name] != nil && !b.dead[name]
}

func (b *testEnv) replicaAddresses() []string {
	list, _ := b.listReplicas("")
	var out []string
	for _, r := range list {
		out = append(out, r.FleetAddress)
	}
	slices.Sort(out)
	return out
}

// sessionHolder returns the replica with the node's session, or nil.
func (b *testEnv) sessionHolder(node string) *replica {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.replicas {
		if !b.dead[r.name] && r.fleet.HasSession(node) {
			return r
		}
	}
	return nil
}

// awaitSession waits until a replica has the node's session and returns the replica.
func (b *testEnv) awaitSession(node string) (r *replica) {
	b.t.Helper()
	b.awaitCondition("session of "+node, func() error {
		if r = b.sessionHolder(node); r == nil {
			return errors.New("no replica has it")
		}
		return nil
	})
	return r
}

func (b *testEnv) createObject(o api.Object) {
	b.t.Helper()
	if err := b.tryCreate(o); err != nil {
		b.t.Fatalf("create %T %s: %v", o, o.GetName(), err)
	}
}

func (b *testEnv) tryCreate(o api.Object) error {
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

// createPod creates a pod bound to a node.
func (b *testEnv) createPod(name, node string, change func(*v1.Pod)) *v1.Pod {
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

// awaitCondition waits until cond returns nil.
func (b *testEnv) awaitCondition(what string, cond func() error) {
	b.t.Helper()
	b.awaitWithin(patience, 2*time.Millisecond, what, cond)
}

func (b *testEnv) awaitWithin(limit, every time.Duration, what string, cond func() error) {
	b.t.Helper()
	await.Until(b.ctx, b.t, limit, every, what, cond)
}

// readyStatus returns the status of a node's Ready condition.
func (b *testEnv) readyStatus(node string) v1.ConditionStatus {
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

func (b *testEnv) awaitReady(node string, want v1.ConditionStatus) {
	b.t.Helper()
	b.awaitCondition("node "+node, b.hasReady(node, want))
}

func (b *testEnv) hasReady(node string, want v1.ConditionStatus) func() error {
	return func() error {
		if got := b.readyStatus(node); got != want {
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

// startAgent starts an agent's session. The agent enrolls if it has no stored state.
func (b *testEnv) startAgent(name string, serve agent.NodeServer) *node {
	b.t.Helper()
	dir := b.t.TempDir()
	n := &node{name: name, state: filepath.Join(dir, "state"), run: filepath.Join(dir, "run")}
	b.restartAgent(n, serve, b.replicaAddresses())
	return n
}

// restartAgent starts the session of a node again with its stored state.
func (b *testEnv) restartAgent(n *node, serve agent.NodeServer, servers []string) {
	b.t.Helper()
	facts := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: map[string]string{v1.LabelHostname: n.name}}}
	facts.Status.NodeInfo.KubeletVersion = "v1.37.0"
	n.Session = session.New(session.Config{
		NodeName: n.name, Join: session.Join{Servers: servers, Token: b.token}, StateDir: n.state, RunDir: n.run,
		Facts: facts, Server: serve, Dial: b.network.dialAddress, HTTPS: len(b.nodeIPs) > 0, NodeIPs: b.nodeIPs,
		Log: slog.New(slog.NewTextHandler(testLog{b.t, n.name},
			&slog.HandlerOptions{Level: slog.LevelDebug})),
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

func (n *node) awaitPod(b *testEnv, uid types.UID) *v1.Pod {
	b.t.Helper()
	b.awaitCondition(fmt.Sprintf("pod on %s", n.name), func() error {
		if _, ok := n.Pod(uid); !ok {
			return errors.New("the agent does not have it")
		}
		return nil
	})
	p, _ := n.Pod(uid)
	return p
}

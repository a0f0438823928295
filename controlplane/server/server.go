package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/apiserver/podsecurity"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/nodegateway"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery/backups"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/controlplane/scheduler"
	"keelson.dev/keelson/controlplane/vip"
	"keelson.dev/keelson/internal/lifecycle"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
)

// timelineStages is how many stage records a replica remembers: 20 MB at most.
const timelineStages = 65536

// Replica is one control-plane replica, wired.
type Replica struct {
	cfg     Config
	cluster datadir.Cluster
	trust   *pki.Trust
	log     *slog.Logger

	store    *replica.Replica
	registry *registry.Registry

	kindsServed *api.Kinds
	// expressions are compiled in environments that all parts share.
	expressions *cel.Compilers

	api        *apiserver.Server
	client     *client.Client
	informers  *client.Informers
	addresses  *podaddress.Index
	tokens     *pki.ServiceTokens
	fleet      *nodegateway.Server
	engine     *controllers.Engine
	scheduler  *scheduler.Scheduler
	peers      *replicas
	timeline   *api.Timeline
	gate       *gate
	secrets    *secrets
	backups    *backups.Keeper // nil where none are asked for
	kept       kept
	level      *level
	keys       *keys
	ca         *pki.ClusterCA
	front      atomic.Pointer[pki.CA] // of the front proxy
	renewedBy  *x509.Certificate      // see renewByCA, which alone uses it
	renewedFor *x509.CertPool
	listeners  threeListeners
	restarts   *prometheus.CounterVec
	work       work // the leader's
	queues     *controllers.QueueMetrics
	reloads    *prometheus.CounterVec
	left       chan struct{} // closed when the group does not know this replica, or rightly so

	addressEvents *addressEvents // records refusals of addresses that nodes report

	authentication *authnfile.Authentication
	authorization  *authzfile.Authorization

	auditLog *audit.Log
	auditor  *audit.Auditor
	pending  atomic.Bool // join tokens made with the cluster wait to be stored

	standby   atomic.Bool            // this replica waits for a vote (standby.go)
	newcomer  bool                   // it has never had all that the group has; keepMembers' alone once it runs
	removed   atomic.Pointer[string] // what the others say when it is a member no more
	ids       *identities
	stale     atomic.Pointer[staleKeys] // nil while it has the keys that the others have
	verifying sync.Mutex                // held while a backup is verified
	admin     sync.Mutex                // held while the administrator's kubeconfig of the data folder is looked at and replaced
	pilot     pilot                     // the leader's
}

// Run runs one replica until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	cfg, err := cfg.addressed()
	if err != nil {
		return err
	}
	if err := cfg.check(); err != nil {
		return err
	}
	cluster, trust, err := cfg.Dir().Load()
	if err != nil {
		return err
	}
	if err := cfg.Dir().CheckLevel(); err != nil {
		return fmt.Errorf("replica %s: %w", cfg.Name, err)
	}
	if cfg.Store.Keys, err = cfg.Dir().StoreKeyFile(cluster); err != nil {
		return err
	}
	release, err := cfg.Dir().Lock()
	if err != nil {
		return err
	}
	defer release()
	found, err := cfg.Dir().AbandonedBy()
	if err == nil && found == nil {
		if err = cfg.run(ctx, cluster, trust); !errors.Is(err, errAbandoned) {
			return err
		}
		found, err = cfg.Dir().AbandonedBy()
	}
	if err == nil && found == nil {
		err = errAbandoned // it could not be written
	}
	if err != nil {
		return fmt.Errorf("replica %s: %w", cfg.Name, err)
	}
	return cfg.serveAbandoned(ctx, cluster, *found)
}

// run runs the replica of a data folder that this process has locked.
func (cfg Config) run(ctx context.Context, cluster datadir.Cluster, trust *pki.Trust) error {
	r, err := wire(cfg, cluster, trust)
	if err != nil {
		return fmt.Errorf("replica %s: %w", cfg.Name, err)
	}
	defer r.listeners.close()
	if cfg.wired != nil {
		cfg.wired(r)
	}
	if a := r.sharedAddress(); a != nil {
		err := vip.Permitted()
		if err == nil {
			err = a.Clear() // one that was killed may have left it
		}
		if err != nil {
			return fmt.Errorf("replica %s: --api-address-shared: %w", cfg.Name, err)
		}
	}
	r.log.Info("replica starts", "cluster", cluster.Name, "address", cfg.Advertise, "version", cfg.Version)
	// When ctx ends, the API ends first, by itself: what it has under way needs the store and all others.
	all, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	return lifecycle.Run(all,
		lifecycle.Part{Name: "backups", Run: r.runBackups},
		lifecycle.Part{Name: "store", Run: r.runStore},
		lifecycle.Part{Name: "membership", Run: r.becomeMember},
		lifecycle.Part{Name: "members", Run: r.keepMembers},
		lifecycle.Part{Name: "identity", Run: r.watchIdentity},
		lifecycle.Part{Name: "removal", Run: r.hearRemoval},
		lifecycle.Part{Name: "secrets", Run: r.secrets.Run},
		lifecycle.Part{Name: "feature level", Run: r.level.Run},
		lifecycle.Part{Name: "keys", Run: r.keys.Run},
		lifecycle.Part{Name: "keys of the others", Run: r.watchKeys},
		lifecycle.Part{Name: "administrator's kubeconfig", Run: func(ctx context.Context) error { return r.keepAdmin(ctx, adminEvery) }},
		lifecycle.Part{Name: "registry", Run: r.registry.Run},
		lifecycle.Part{Name: "audit", Run: r.auditLog.Run},
		lifecycle.Part{Name: "authentication", Run: r.authentication.Run},
		lifecycle.Part{Name: "authorization", Run: r.authorization.Run},
		lifecycle.Part{Name: "apiserver", Run: func(all context.Context) error { return r.serve(ctx, all, end) }},
		lifecycle.Part{Name: "informers", Run: r.runInformers},
		lifecycle.Part{Name: "fleet", Run: r.fleet.Run},
		lifecycle.Part{Name: "events of refused addresses", Run: r.recordAddressEvents},
		lifecycle.Part{Name: "replicas", Run: r.peers.Run},
		lifecycle.Part{Name: "guest", Run: r.beGuest},
		lifecycle.Part{Name: "leader", Run: func(ctx context.Context) error { return r.store.Lead(ctx, r.lead) }},
	)
}

// runStore runs the store, when it is safe that it takes part in the group.
func (r *Replica) runStore(ctx context.Context) error {
	if err := r.leaveFirst(ctx); err != nil {
		return err
	}
	close(r.left)
	if err := r.askIdentities(ctx); err != nil {
		return err
	}
	err := r.store.Run(ctx)
	for _, damage := range []error{disk.ErrCorruptLog, disk.ErrCorruptVotes, disk.ErrCorruptSnapshot, disk.ErrCorruptKeys} {
		if errors.Is(err, damage) {
			return fmt.Errorf("%w: 'keelson-controlplane rebuild' on this machine does both, while the other replicas have the data", err)
		}
	}
	return err
}

// wire builds every part; nothing runs yet but the listeners, so that a taken
// port is the first thing one hears of.
func wire(cfg Config, cluster datadir.Cluster, trust *pki.Trust) (r *Replica, err error) {
	r = &Replica{cfg: cfg, cluster: cluster, trust: trust, log: cfg.Log, timeline: api.NewTimeline(timelineStages), restarts: newRestarts(), addressEvents: &addressEvents{now: time.Now}, queues: controllers.NewQueueMetrics(), left: make(chan struct{})}
	var f founder
	if _, err := datadir.ReadJSON(filepath.Join(cfg.DataDir, datadir.FounderFile), &f); err != nil {
		return nil, err
	}
	r.pending.Store(len(f.Tokens) > 0)
	placing, err := scheduler.LoadConfig(cfg.SchedulerConfig)
	if err != nil {
		return nil, err
	}
	r.ids = newIdentities(cfg, cluster)
	conf, err := cfg.Dir().StoreConfigToRun(cluster)
	if err != nil {
		return nil, err
	}
	listeners, err := cfg.listen(cluster)
	if err != nil {
		return nil, err
	}
	if cfg.SharedAPI != "" {
		api, err := listenShared(listeners.api, cfg.SharedAPI, cluster.APIPort)
		if err != nil {
			listeners.close()
			return nil, err
		}
		listeners.api = api
	}
	r.listeners = listeners
	defer func() {
		if err != nil {
			listeners.close()
		}
	}()
	now := time.Now
	if r.ca, err = pki.NewClusterCA(filepath.Join(cfg.DataDir, datadir.PKIFolder), now); err != nil {
		return nil, err
	}
	serving := r.ca.Serving(r.servingProfile())
	if err := r.wireStore(conf, listeners.peer); err != nil {
		return nil, err
	}
	if err := r.wireBackups(); err != nil {
		return nil, err
	}
	r.expressions = cel.New()
	all := kinds.All(kinds.Compiling(r.expressions.Admission().Judge))
	r.kindsServed = all
	r.registry = registry.New(r.store, all, registry.WithHistoryAge(conf.HistoryAge),
		registry.WithHistory(0, registry.HistoryOf(r.cfg.MemoryLimit)),
		registry.WithShortFields(func() bool { return r.level.seen.Load() >= datadir.LevelShortFields }),
		registry.WithCompanions(&corev1.Node{}, nodegateway.NodeCompanions),
		registry.WithCompanions(&corev1.Service{}, networking.ServiceCompanions))
	own := pki.Client(replicaUser+cfg.Name, api.GroupMasters)
	own.Life = cfg.certificateLife
	probe := r.ca.Rotator(own)
	r.peers = newReplicas(cfg.Name, cluster, func() []raftMember { return r.store.Status().Members },
		func() *tls.Config { return pki.ClientTLS(r.ca.Pool(), probe, "", now) }, cfg.Log.With("part", "replicas"))
	r.peers.shared, r.peers.ids = cfg.SharedAPI, r.ids
	r.peers.renew()
	if err := r.wireAPI(listeners.api, serving, all); err != nil {
		return nil, err
	}
	r.client = client.New(r.api.Backend(), all)
	r.informers = client.NewInformers(r.client.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}))
	if err := r.wireAddresses(); err != nil {
		return nil, err
	}
	r.wireFleet(listeners.fleet)
	r.wireLeader(placing)
	return r, nil
}

// wireStore builds the store behind its gate.
func (r *Replica) wireStore(conf replica.Config, ln net.Listener) error {
	r.gate = newGate(r.cfg.Name, func() []raftMember { return r.store.Status().Members }, func() bool { return r.store.Ready() },
		r.log.With("part", "gate"))
	newcomer, err := r.cfg.Dir().IsJoining()
	if err != nil {
		return err
	}
	r.newcomer, r.gate.joins = newcomer, newcomer
	has, err := r.cfg.Dir().HasRaftData()
	if err != nil {
		return err
	}
	r.ids.joins, r.ids.empty = newcomer || !has, !has
	peer := pki.ReplicaPeer(r.cfg.Name, r.cfg.Advertise)
	peer.Life = r.cfg.certificateLife
	authorities, err := pki.NewPeers(filepath.Join(r.cfg.DataDir, datadir.PKIFolder), peer, time.Now)
	if err != nil {
		return err
	}
	conf.Listener, conf.ServerTLS, conf.ClientTLS = r.gate.listen(ln), r.gate.guard(authorities.Server()), authorities.Client()
	r.level = &level{own: r.cfg.Dir().FeatureLevel, release: r.cfg.Version, folder: r.cfg.DataDir, log: r.log.With("part", "feature level")}
	conf.FeatureLevel, conf.StoredLevel = r.level.own, r.level.applied
	waits, err := r.cfg.Dir().JoinedAsStandby()
	if err != nil {
		return err
	}
	r.standby.Store(waits)
	conf.Standby = r.standby.Load
	if r.store, err = replica.New(conf); err != nil {
		return err
	}
	r.level.store = r.store
	r.secrets = &secrets{options: r.cfg.Store, authorities: authorities, rekey: r.store.ReloadKeys, log: r.log.With("part", "secrets")}
	r.secrets.current.Store(conf.Keys)
	return nil
}

// metrics is what /metrics shows besides the requests: the process and the store.
func (r *Replica) metrics() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), r.store.Collector(), r.restarts, r.queues)
	reg.MustRegister(r.auditLog.Collectors()...)
	reg.MustRegister(r.reloads, certificateMetrics{r}, keyMetrics{r}, pilotMetrics{r})
	if r.backups != nil {
		reg.MustRegister(r.backups.Collectors()...)
	}
	return reg
}

// newRestarts counts how often the parts of the leader's work were begun again.
func newRestarts() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "keelson_leader_part_restarts_total", Help: "How often a part of the leader's work failed and was begun again.",
	}, []string{"part"})
}

type threeListeners struct{ api, fleet, peer net.Listener }

// close closes what a part has not closed that never came to it.
func (l threeListeners) close() {
	for _, one := range []net.Listener{l.api, l.fleet, l.peer} {
		if one != nil {
			one.Close()
		}
	}
}

// listen opens the ports of this replica; a guest brings its own.
func (c Config) listen(cluster datadir.Cluster) (threeListeners, error) {
	if c.guest != nil {
		return c.guest.listeners, nil
	}
	return listen(c.Advertise, cluster)
}

func listen(host string, c datadir.Cluster) (l threeListeners, err error) {
	for _, p := range []struct {
		into *net.Listener
		port int
		what string
	}{{&l.api, c.APIPort, "the API"}, {&l.fleet, c.FleetPort, "agents"}, {&l.peer, c.PeerPort, "the other replicas"}} {
		if *p.into, err = net.Listen("tcp", datadir.HostPort(host, p.port)); err != nil {
			l.close()
			return l, fmt.Errorf("listening for %s: %w: is another replica running on this machine ('ss -ltnp'), and is --advertise-address one of its addresses?", p.what, err)
		}
	}
	return l, nil
}

func (r *Replica) wireAPI(ln net.Listener, serving *pki.Rotator, all *api.Kinds) error {
	tokens, err := pki.NewServiceTokens(pki.DefaultIssuer, r.trust.ServiceKey, r.trust.ServiceTrusted...)
	if err != nil {
		return err
	}
	r.tokens = tokens
	r.wireKeys()
	security, err := podsecurity.Load(r.cfg.AdmissionConfig)
	if err != nil {
		return err
	}
	auditor, err := r.wireAudit()
	if err != nil {
		return err
	}
	if err := r.wireAccess(tokens.Issuer()); err != nil {
		return err
	}
	proxy, err := r.frontProxy(serving)
	if err != nil {
		return err
	}
	toNodes := r.ca.Rotator(pki.Client(api.UserAPIServer, api.GroupMasters))
	r.api = apiserver.New(apiserver.Config{
		Name: r.cfg.Name, Registry: r.registry, Kinds: all, Scheme: api.Scheme(), Expressions: r.expressions,
		Listener: ln, TLS: r.ca.Server(serving),
		ClientCAs: r.ca.Pool, ClientSeen: r.keys.sawClient,
		ServiceTokens: tokens, Authentication: r.authentication, Authorization: r.authorization,
		ServiceCIDR:       r.cluster.ServicePrefixes()[0],
		SecondServiceCIDR: r.cluster.SecondServiceCIDR(),
		PodCIDRs:          r.cluster.ClusterPrefixes(),
		ExternalIPRanges:  r.cfg.ExternalIPRanges,
		ReplicaAddresses:  r.peers.listening,
		PodAddresses:      func() *podaddress.Index { return r.addresses },
		AddressRefused:    r.addressEvents.refused,
		PodSecurity:       security,
		AdmissionPlugins:  r.cfg.AdmissionPlugins,
		MemoryLimit:       r.cfg.MemoryLimit,
		ShutdownDelay:     r.cfg.ShutdownDelay,
		Flags:             r.cfg.Flags,
		Audit:             auditor,
		Streams:           lateStreams{r},
		Nodes:             lateStreams{r},
		NodeTLS:           func(node string) *tls.Config { return pki.NodeTLS(r.ca.Pool(), toNodes, node, time.Now) },
		FrontProxy:        proxy,
		Timeline:          r.timeline,
		PeerStages:        r.peers.Stages,
		Live:              (&heartbeats{own: func() map[string]time.Time { return r.fleet.Heard() }, others: r.peers.Heartbeats}).live,
		Leader:            func() string { return r.store.Status().Leader },
		Components:        r.components,
		Usage:             func(of []api.Object) []api.Object { return metricsOf(of, r.fleet.Used(), time.Now()) },
		Ready:             r.ready,
		Version:           serverVersion(r.cfg.Version),
		Paths:             r.paths(),
		Wrap:              r.ids.guard(func(q *http.Request) string { return replicaOf(q, r.ca.Pool()) }),
		Metrics:           r.metrics(),
		Log:               r.log.With("part", "apiserver"),

		LostNodeToleration: cmp.Or(r.cfg.PodEviction, defaultPodEviction),
	})
	return nil
}

// replicaUser, with a replica's name behind it, is as whom that one asks the others.
const replicaUser = "keelson:replica:"

// serverVersion says which Kubernetes API is served, for clients that look.
func serverVersion(own string) version.Info {
	return version.Info{
		Major: "1", Minor: strconv.Itoa(kinds.KubernetesMinor), GitVersion: fmt.Sprintf("v1.%d.0+keelson-%s", kinds.KubernetesMinor, own), Platform: "linux/amd64", GoVersion: goVersion(),
	}
}

// servingProfile is that of the certificates of this replica's API and of its port for agents.
func (r *Replica) servingProfile() pki.Profile {
	p := pki.ReplicaServing(r.cfg.Name, r.cluster.APIServiceIP().AsSlice(), r.cfg.addresses()...)
	p.Life = r.cfg.certificateLife
	return p
}

func (r *Replica) wireFleet(ln net.Listener) {
	r.fleet = nodegateway.New(nodegateway.Config{
		Replica: r.cfg.Name, Listener: ln, TLS: r.ca.Enrolment(r.servingProfile()),
		Client: r.client, Informers: r.informers, PodAddresses: r.addresses,
		Cluster:  nodegateway.Cluster{Name: r.cluster.Name, ClusterCIDR: r.cluster.ClusterCIDR, ServiceCIDR: r.cluster.ServiceCIDR, Domain: r.cluster.Domain},
		TokenKey: r.trust.TokenKey(),
		SignNode: func(node string, csr []byte, atLeast time.Time) ([]byte, error) {
			now := time.Now()
			if atLeast.After(now) {
				now = atLeast
			}
			return r.ca.SignAgent(csr, node, agentCertificateLife, now)
		},
		SignServing: func(node string, csr []byte, seen netip.Addr) ([]byte, error) {
			return r.ca.SignServing(csr, node, seen, servingCertificateLife, time.Now())
		},
		CertificateLife: agentCertificateLife,
		Audit:           r.auditJoins,
		CA:              r.ca,
		EnrollReplica:   r.enrollReplica,
		TokensWait:      r.pending.Load,
		Replicas:        r.peers.List,
		Alive:           r.peers.Alive,
		Connected:       r.store.Ready,
		Identity:        r.ids.current,
		Timeline:        r.timeline,
		Heartbeat:       r.cfg.Heartbeat,
		Log:             r.log.With("part", "fleet"),
	})
}

// agentCertificateLife is how long a node's certificate is good for; agents renew at two thirds.
const agentCertificateLife = 365 * 24 * time.Hour

// servingCertificateLife is the same of the certificate of a node's own HTTPS server. It is shorter: revoking a node
// does not reach those who verify it.
const servingCertificateLife = 30 * 24 * time.Hour

// ready says why this replica should get no traffic.
func (r *Replica) ready(context.Context) error {
	if why := r.removed.Load(); why != nil {
		return errors.New(*why)
	}
	if stale := r.stale.Load(); stale != nil {
		return errors.New(stale.Message)
	}
	if !r.store.Ready() {
		return errors.New("the store has no leader or has not caught up")
	}
	if err := r.level.ready(); err != nil {
		return err
	}
	if r.pending.Load() {
		return errors.New("the join tokens made with the cluster are not stored yet")
	}
	return nil
}

// runInformers waits for the store to be readable first, so that a joining
// replica's informers do not fail until it is a member.
func (r *Replica) runInformers(ctx context.Context) error {
	select {
	case <-r.registry.Ready():
	case <-ctx.Done():
		return ctx.Err()
	}
	return r.informers.Run(ctx)
}

package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
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
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/keyrotation"
	"keelson.dev/keelson/controlplane/membership"
	"keelson.dev/keelson/controlplane/nodegateway"
	"keelson.dev/keelson/controlplane/nodegateway/accept"
	"keelson.dev/keelson/controlplane/nodegateway/session"
	"keelson.dev/keelson/controlplane/operator"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery/backups"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/controlplane/registry/watchcache"
	"keelson.dev/keelson/controlplane/scheduler"
	"keelson.dev/keelson/controlplane/server/addressevents"
	"keelson.dev/keelson/controlplane/server/auditing"
	"keelson.dev/keelson/controlplane/server/heartbeats"
	"keelson.dev/keelson/controlplane/server/nodemetrics"
	"keelson.dev/keelson/controlplane/vip"
	"keelson.dev/keelson/internal/lifecycle"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
)

// maxTimelineStages is the maximum number of stages in the api.Timeline of this replica. A stage is
// a measured step in the processing of a client's write. The stages need at most 20 MB of memory.
const maxTimelineStages = 65536

// Replica is one control-plane replica with all its components.
type Replica struct {
	cfg     Config
	cluster datadir.Cluster
	log     *slog.Logger

	store     *replica.Replica
	registry  *registry.Registry
	trust     trustParts
	members   *membership.Membership
	api       apiParts
	nodes     nodeLink
	leader    leaderParts
	operator  *operator.API
	backups   *backups.Keeper // nil if no backups are configured
	listeners portListeners
}

// trustParts contains the keys and certificates of a replica, and the components that rotate them.
type trustParts struct {
	shared       *pki.Trust // keys and CAs that all replicas share, as read when the replica started
	ca           *pki.ClusterCA
	secrets      *keyrotation.SecretFiles
	keys         *keyrotation.Rotator
	certificates *operator.OwnCertificates
}

// apiParts contains the API server, the components that it uses, and its clients in this process.
type apiParts struct {
	server    *apiserver.Server
	client    *client.Client
	informers *client.Informers

	kinds          *api.Kinds
	compilers      *cel.Compilers // compilers of CEL expressions with shared CEL environments
	addresses      *podaddress.Index
	addressEvents  *addressevents.Recorder // Events about refused addresses
	timeline       *api.Timeline
	authentication *authnfile.Authentication
	authorization  *authzfile.Authorization
	requests       *client.RequestMetrics // counts the requests of client
	reloads        *prometheus.CounterVec // counts reloads of the authentication and authorization files
	auditLog       *audit.Log
	auditor        *audit.Auditor
}

// leaderParts contains the components that run while this replica is the leader.
type leaderParts struct {
	engine    *engine.Engine
	scheduler *scheduler.Scheduler
	queues    *engine.QueueMetrics
	pods      *scheduler.Metrics
	work      operator.LeaderWork
}

// Members returns the part of the replica that manages its membership in the cluster.
func (r *Replica) Members() *membership.Membership { return r.members }

// Run runs one replica until ctx ends. If the cluster was recovered or restored without this
// replica, Run serves only a cluster status that contains an alarm.
func Run(ctx context.Context, cfg Config) error {
	cfg, err := cfg.withAddress()
	if err != nil {
		return err
	}
	if err := cfg.checkSettings(); err != nil {
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
	abandoned, err := cfg.Dir().AbandonedBy()
	if err == nil && abandoned == nil {
		if err = cfg.runLocked(ctx, cluster, trust); !errors.Is(err, membership.ErrAbandoned) {
			return err
		}
		abandoned, err = cfg.Dir().AbandonedBy()
	}
	if err == nil && abandoned == nil {
		err = membership.ErrAbandoned // the record could not be written
	}
	if err != nil {
		return fmt.Errorf("replica %s: %w", cfg.Name, err)
	}
	return membership.ServeAbandoned(ctx, membership.AbandonedConfig{Dir: cfg.Dir(), Version: cfg.Process.Version,
		Addresses: cfg.apiAddresses()},
		cluster, *abandoned)
}

// runLocked creates the components of the replica and runs them until ctx ends. The caller must
// have locked the data directory.
func (cfg Config) runLocked(ctx context.Context, cluster datadir.Cluster, trust *pki.Trust) error {
	r, err := wireReplica(cfg, cluster, trust)
	if err != nil {
		return fmt.Errorf("replica %s: %w", cfg.Name, err)
	}
	defer r.listeners.closeAll()
	if cfg.Wired != nil {
		cfg.Wired(r)
	}
	if a := r.sharedAddress(); a != nil {
		err := vip.CheckPermissions()
		if err == nil {
			err = a.RemoveStale() // a killed process may have left the address on this machine
		}
		if err != nil {
			return fmt.Errorf("replica %s: --api-address-shared: %w", cfg.Name, err)
		}
	}
	r.log.Info("replica starts", "cluster", cluster.Name, "address", cfg.Advertise, "version", cfg.Process.Version)
	// When ctx ends, the API server stops first. Requests in progress need the other parts, which
	// stop after it.
	all, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	return lifecycle.Run(all,
		lifecycle.Part{Name: "backups", Run: r.runBackups},
		lifecycle.Part{Name: "store", Run: r.runStore},
		lifecycle.Part{Name: "membership", Run: r.members.BecomeMember},
		lifecycle.Part{Name: "members", Run: r.members.RecordMembers},
		lifecycle.Part{Name: "identity", Run: r.members.WatchIdentity},
		lifecycle.Part{Name: "removal", Run: r.members.WatchRemoval},
		lifecycle.Part{Name: "secrets", Run: r.trust.secrets.Run},
		lifecycle.Part{Name: "feature level", Run: r.members.Level().Run},
		lifecycle.Part{Name: "keys", Run: r.trust.keys.Run},
		lifecycle.Part{Name: "keys of the others", Run: r.trust.keys.CompareKeys},
		lifecycle.Part{Name: "administrator's kubeconfig", Run: func(ctx context.Context) error {
			return r.trust.keys.RenewKubeconfig(ctx, keyrotation.KubeconfigInterval)
		}},
		lifecycle.Part{Name: "registry", Run: r.registry.Run},
		lifecycle.Part{Name: "audit", Run: r.api.auditLog.Run},
		lifecycle.Part{Name: "authentication", Run: r.api.authentication.Run},
		lifecycle.Part{Name: "authorization", Run: r.api.authorization.Run},
		lifecycle.Part{Name: "apiserver", Run: func(all context.Context) error { return r.runAPI(ctx, all, end) }},
		lifecycle.Part{Name: "informers", Run: r.runInformers},
		lifecycle.Part{Name: "fleet", Run: r.nodes.gateway.Run},
		lifecycle.Part{Name: "events of refused addresses", Run: func(ctx context.Context) error {
			as := r.api.client.As(api.User{Name: api.UserAPIServer,
				Groups: []string{api.GroupMasters, api.GroupAuthenticated}})
			return r.api.addressEvents.Run(ctx, as, r.cfg.Name, r.log.With("part", "events of refused addresses"))
		}},
		lifecycle.Part{Name: "replicas", Run: r.members.Peers().Run},
		lifecycle.Part{Name: "guest", Run: r.runGuest},
		lifecycle.Part{Name: "leader", Run: func(ctx context.Context) error { return r.store.Lead(ctx, r.runLeader) }},
	)
}

// runStore runs the store of this replica. It first waits for PrepareStore, which removes a
// previous member of the same name from the raft cluster. If a file of the store is damaged, the
// error names the command that rebuilds the data.
func (r *Replica) runStore(ctx context.Context) error {
	if err := r.members.PrepareStore(ctx); err != nil {
		return err
	}
	err := r.store.Run(ctx)
	for _, damage := range []error{disk.ErrCorruptLog, disk.ErrCorruptVotes, disk.ErrCorruptSnapshot,
		disk.ErrCorruptKeys} {
		if errors.Is(err, damage) {
			return fmt.Errorf("%w: 'keelson-controlplane rebuild' on this machine does both, while the other replicas "+
				"have the data", err)
		}
	}
	return err
}

// wireReplica creates the components of the replica in the order of their dependencies, and starts
// none of them. It opens the listeners early, so that a port that is in use is reported first.
func wireReplica(cfg Config, cluster datadir.Cluster, trust *pki.Trust) (r *Replica, err error) {
	r = &Replica{cfg: cfg, cluster: cluster, log: cfg.Process.Log, trust: trustParts{shared: trust}}
	r.api.timeline, r.api.addressEvents = api.NewTimeline(maxTimelineStages), addressevents.NewRecorder(time.Now)
	r.api.requests = client.NewRequestMetrics(datadir.HostPort(cfg.Advertise, cluster.APIPort))
	r.leader.queues, r.leader.pods = engine.NewQueueMetrics(), scheduler.NewMetrics()
	schedulerConfig, err := scheduler.LoadConfig(cfg.Leader.SchedulerConfig)
	if err != nil {
		return nil, err
	}
	conf, err := cfg.Dir().StoreConfigToRun(cluster)
	if err != nil {
		return nil, err
	}
	listeners, err := cfg.openListeners(cluster)
	if err != nil {
		return nil, err
	}
	if cfg.Network.SharedAPI != "" {
		apiListener, err := vip.Listen(listeners.api, cfg.Network.SharedAPI, cluster.APIPort)
		if err != nil {
			listeners.closeAll()
			return nil, err
		}
		listeners.api = apiListener
	}
	r.listeners = listeners
	defer func() {
		if err != nil {
			listeners.closeAll()
		}
	}()
	now := time.Now
	if r.trust.ca, err = pki.NewClusterCA(filepath.Join(cfg.DataDir, datadir.PKIFolder), now); err != nil {
		return nil, err
	}
	serving := r.trust.ca.ServingRotator(r.servingProfile())
	if err := r.wireMembers(); err != nil {
		return nil, err
	}
	if err := r.wireStore(conf, listeners.peer); err != nil {
		return nil, err
	}
	if err := r.wireBackups(); err != nil {
		return nil, err
	}
	r.api.compilers = cel.New()
	all := kinds.All(kinds.WithCompiler(r.api.compilers.Admission().Judge))
	r.api.kinds = all
	r.registry = registry.New(r.store, all, registry.WithHistoryAge(conf.History.HistoryAge),
		registry.WithHistory(0, watchcache.HistoryBytesFor(r.cfg.Limits.Memory)),
		registry.WithShortFields(func() bool { return r.members.Level().CurrentLevel() >= datadir.LevelShortFields }),
		registry.WithCompanions(&corev1.Node{}, accept.NodeCompanions),
		registry.WithCompanions(&corev1.Service{}, networking.ServiceCompanions))
	if err := r.wireAPI(listeners.api, serving, all); err != nil {
		return nil, err
	}
	r.api.client = client.New(r.api.requests.MeasureBackend(r.api.server.Backend()), all)
	r.api.informers = client.NewInformers(r.api.client.As(api.User{Name: api.UserAPIServer,
		Groups: []string{api.GroupMasters, api.GroupAuthenticated}}))
	if err := r.wireAddresses(); err != nil {
		return nil, err
	}
	r.trust.keys.SetClient(r.api.client, r.api.informers)
	r.operator.SetClient(r.api.client)
	r.wireFleet(listeners.fleet)
	r.wireLeader(schedulerConfig)
	return r, nil
}

// wireMembers creates the membership.Membership of this replica. wireStore and wireKeys later set
// its store and its keys.
func (r *Replica) wireMembers() (err error) {
	own := pki.Client(clusterhttp.ReplicaUserPrefix+r.cfg.Name, api.GroupMasters)
	own.Life = r.cfg.Timing.CertificateLife
	certificate := r.trust.ca.Rotator(own)
	r.members, err = membership.New(membership.Config{
		Dir: r.cfg.Dir(), Cluster: r.cluster, Trust: r.trust.shared, Version: r.cfg.Process.Version,
		SharedAddress:    r.cfg.Network.SharedAPI,
		ReplaceDeadAfter: r.cfg.Membership.ReplaceDeadAfter,
		TLS:              func() *tls.Config { return pki.ClientTLS(r.trust.ca.Pool(), certificate, "", time.Now) },
		AuditRemoval: func(user, name, reason string, failure error) {
			auditing.RecordRemoval(r.api.auditor, user, name, reason, failure)
		},
		Log: r.log,
	})
	return err
}

// wireStore creates the raft store of this replica. The store accepts connections at ln, the peer
// port, only from members of the cluster.
func (r *Replica) wireStore(conf replica.Config, ln net.Listener) error {
	peer := pki.ReplicaPeer(r.cfg.Name, r.cfg.Advertise)
	peer.Life = r.cfg.Timing.CertificateLife
	authorities, err := pki.NewPeers(filepath.Join(r.cfg.DataDir, datadir.PKIFolder), peer, time.Now)
	if err != nil {
		return err
	}
	conf.Network.Listener, conf.Network.ServerTLS = r.members.GuardListener(ln, authorities.Server())
	conf.Network.ClientTLS = authorities.Client()
	conf.Program.FeatureLevel, conf.Program.StoredLevel = r.cfg.Dir().FeatureLevel, r.members.Level().ReadAppliedLevel
	conf.Program.Standby = r.members.IsStandby
	if r.store, err = replica.New(conf); err != nil {
		return err
	}
	r.members.SetStore(r.store)
	r.trust.secrets = keyrotation.NewSecretFiles(r.cfg.Store, authorities, conf.Storage.Keys, r.store.ReloadKeys,
		r.log.With("part", "secrets"))
	return nil
}

// newMetricsRegistry returns the metrics that /metrics exposes in addition to those of the API
// server: metrics of the process, the store, and other components.
func (r *Replica) newMetricsRegistry() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		r.store.Collector(), r.leader.work.Collector(), r.leader.queues, r.leader.pods)
	reg.MustRegister(r.api.auditLog.Collectors()...)
	reg.MustRegister(r.api.requests, r.api.reloads, r.trust.certificates, r.trust.keys.Collector(),
		r.members.Collector(), prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "apiserver_storage_size_bytes",
			Help:        "Bytes of the store on this replica's disk: log, journal and snapshots.",
			ConstLabels: prometheus.Labels{"storage_cluster_id": "etcd-0"}, // there is one store
		}, func() float64 { return float64(r.store.Status().DiskBytes) }))
	if r.backups != nil {
		reg.MustRegister(r.backups.Collectors()...)
	}
	return reg
}

type portListeners struct{ api, fleet, peer net.Listener }

// closeAll closes all open listeners, also those that no component uses yet. It may be called more
// than once.
func (l portListeners) closeAll() {
	for _, one := range []net.Listener{l.api, l.fleet, l.peer} {
		if one != nil {
			one.Close()
		}
	}
}

// openListeners opens the three ports of this replica: for the API, for agents and for the other
// replicas. For a replica that serves a backup, it returns the listeners in c.servedBackup, which
// are already open.
func (c Config) openListeners(cluster datadir.Cluster) (portListeners, error) {
	if c.servedBackup != nil {
		return c.servedBackup.listeners, nil
	}
	return listenOn(c.Advertise, cluster)
}

func listenOn(host string, c datadir.Cluster) (l portListeners, err error) {
	for _, p := range []struct {
		into *net.Listener
		port int
		what string
	}{{&l.api, c.APIPort, "the API"}, {&l.fleet, c.FleetPort, "agents"}, {&l.peer, c.PeerPort, "the other replicas"}} {
		if *p.into, err = net.Listen("tcp", datadir.HostPort(host, p.port)); err != nil {
			l.closeAll()
			return l,
				fmt.Errorf("listening for %s: %w: is another replica running on this machine ('ss -ltnp'), and is "+
					"--advertise-address one of its addresses?", p.what, err)
		}
	}
	return l, nil
}

func (r *Replica) wireAPI(ln net.Listener, serving *pki.Rotator, all *api.Kinds) error {
	tokens, err := pki.NewServiceTokens(pki.DefaultIssuer, r.trust.shared.ServiceKey, r.trust.shared.ServiceTrusted...)
	if err != nil {
		return err
	}
	if err := r.wireKeys(tokens); err != nil {
		return err
	}
	security, err := podsecurity.Load(r.cfg.Admission.ConfigFile)
	if err != nil {
		return err
	}
	if r.api.auditLog, r.api.auditor, err = auditing.New(r.cfg.Access.Audit, r.cfg.DataDir,
		r.log.With("part", "audit")); err != nil {
		return err
	}
	if err := r.wireAccess(tokens.Issuer()); err != nil {
		return err
	}
	front := r.frontProxy(serving)
	r.wireOperator()
	toNodes := r.trust.ca.Rotator(pki.Client(api.UserAPIServer, api.GroupMasters))
	r.api.server = apiserver.New(apiserver.Config{
		Name: r.cfg.Name, Registry: r.registry, Kinds: all, Scheme: api.Scheme(), Log: r.log.With("part", "apiserver"),
		Serving: apiserver.ServingConfig{
			Listener: ln, TLS: r.trust.ca.Server(serving), Paths: r.operator.Handlers(),
			Wrap:        r.members.GuardRequests(r.trust.ca.Pool),
			MemoryLimit: r.cfg.Limits.Memory, ShutdownDelay: r.cfg.Timing.ShutdownDelay,
		},
		Authentication: apiserver.AuthenticationConfig{
			ClientCAs: r.trust.ca.Pool, ClientSeen: r.trust.keys.ObserveClient, ServiceTokens: tokens,
			Configured: r.api.authentication,
		},
		Authorization: r.api.authorization,
		Network: apiserver.NetworkConfig{
			ServiceCIDR: r.cluster.ServicePrefixes()[0], SecondServiceCIDR: r.cluster.SecondServiceCIDR(),
			PodCIDRs: r.cluster.ClusterPrefixes(), ExternalIPRanges: r.cfg.Network.ExternalIPRanges,
			ReplicaAddresses: r.members.Peers().ListenAddresses,
			PodAddresses: func() *podaddress.Index {
				return r.api.addresses
			}, AddressRefused: r.api.addressEvents.RecordRefusal,
		},
		Admission: apiserver.AdmissionConfig{
			Plugins: r.cfg.Admission.Plugins, PodSecurity: security, Expressions: r.api.compilers,
			LostNodeToleration:  cmp.Or(r.cfg.Admission.PodEviction, defaultPodEviction),
			RequireNodeFeatures: requireNodeFeatures(r.members.Level),
		},
		Outbound: apiserver.OutboundConfig{
			Streams: &r.nodes, Nodes: &r.nodes, FrontProxy: front,
			NodeTLS: func(node string) *tls.Config { return pki.NodeTLS(r.trust.ca.Pool(), toNodes, node, time.Now) },
		},
		Timeline: apiserver.TimelineConfig{
			Stages: r.api.timeline, PeerStages: r.members.Peers().FetchStages, Leader: func() string {
				return r.store.Status().Leader
			},
		},
		State: apiserver.StateConfig{
			Live: (&heartbeats.Collector{Own: func() map[string]time.Time {
				return r.nodes.LastHeartbeats()
			}, Others: r.members.Peers().FetchHeartbeats}).AddTo,
			Components: r.operator.Components, Ready: r.checkReady,
			Usage: func(of []api.Object) []api.Object { return nodemetrics.List(of, r.nodes.NodeUsages(), time.Now()) },
		},
		Process: apiserver.ProcessConfig{
			Audit: r.api.auditor, Metrics: r.newMetricsRegistry(), Flags: r.cfg.Process.Flags,
			Version: serverVersion(r.cfg.Process.Version),
		},
	})
	return nil
}

// serverVersion returns the response of /version. It contains the version of the Kubernetes API,
// and release, the release of Keelson.
func serverVersion(release string) version.Info {
	return version.Info{
		Major: "1", Minor: strconv.Itoa(kinds.KubernetesMinor),
		GitVersion: fmt.Sprintf("v1.%d.0+keelson-%s", kinds.KubernetesMinor, release), Platform: "linux/amd64",
		GoVersion: runtime.Version(),
	}
}

// servingProfile returns the profile of the server certificates of this replica. The replica
// presents these certificates on its API port and its port for agents.
func (r *Replica) servingProfile() pki.Profile {
	p := pki.ReplicaServing(r.cfg.Name, r.cluster.APIServiceIP().AsSlice(), r.cfg.apiAddresses()...)
	p.Life = r.cfg.Timing.CertificateLife
	return p
}

func (r *Replica) wireFleet(ln net.Listener) {
	gateway := nodegateway.New(nodegateway.Config{
		Replica: r.cfg.Name,
		Listen: nodegateway.ListenConfig{Listener: ln, TLS: r.trust.ca.EnrollmentTLS(r.servingProfile()),
			Identity: r.members.Identity},
		Client: r.api.client, Informers: r.api.informers, PodAddresses: r.api.addresses,
		Cluster: session.Cluster{Name: r.cluster.Name, ClusterCIDR: r.cluster.ClusterCIDR,
			ServiceCIDR: r.cluster.ServiceCIDR, Domain: r.cluster.Domain},
		Enroll: accept.EnrollConfig{
			TokenKey: r.trust.shared.TokenKey(),
			SignNode: func(node string, csr []byte, atLeast time.Time) ([]byte, error) {
				now := time.Now()
				if atLeast.After(now) {
					now = atLeast
				}
				return r.trust.ca.SignAgent(csr, node, agentCertificateLife, now)
			},
			SignServing: func(node string, csr []byte, seen netip.Addr) ([]byte, error) {
				return r.trust.ca.SignServing(csr, node, seen, servingCertificateLife, time.Now())
			},
			CertificateLife: agentCertificateLife,
			Audit: func(a accept.AuditRequest) (func(accept.AuditResult), error) {
				return auditing.RecordJoin(r.api.auditor, a)
			},
			EnrollReplica: r.members.EnrollReplica,
			TokensPending: r.members.InitialTokens().HasPending,
		},
		CA: r.trust.ca,
		Replicas: nodegateway.ReplicasConfig{List: r.members.Peers().ListReplicas, IsAlive: r.members.Peers().IsReady,
			CanWrite: r.store.Ready},
		Timeline: r.api.timeline,
		Timing:   nodegateway.Timing{Heartbeat: r.cfg.Timing.AgentHeartbeat},
		Log:      r.log.With("part", "fleet"),
	})
	r.nodes.setGateway(gateway)
}

// agentCertificateLife is the lifetime of a node's client certificate. Agents renew it after two
// thirds of that time.
const agentCertificateLife = 365 * 24 * time.Hour

// servingCertificateLife is the lifetime of the certificate of a node's HTTPS server. It is shorter
// than agentCertificateLife, because clients that verify this certificate do not check whether it
// was revoked.
const servingCertificateLife = 30 * 24 * time.Hour

// checkReady returns nil if this replica can serve requests. Otherwise it returns the reason.
func (r *Replica) checkReady(context.Context) error {
	if err := r.members.CheckMember(); err != nil {
		return err
	}
	if stale := r.trust.keys.StaleKeys(); stale != nil {
		return errors.New(stale.Message)
	}
	if !r.store.Ready() {
		return errors.New("the store has no leader or has not caught up")
	}
	if err := r.members.Level().CheckReady(); err != nil {
		return err
	}
	if r.members.InitialTokens().HasPending() {
		return errors.New("the join tokens created with the cluster are not stored yet")
	}
	return nil
}

// runInformers runs the informers as soon as the registry is ready. Before that, on a joining
// replica, their requests would fail.
func (r *Replica) runInformers(ctx context.Context) error {
	select {
	case <-r.registry.Ready():
	case <-ctx.Done():
		return ctx.Err()
	}
	return r.api.informers.Run(ctx)
}

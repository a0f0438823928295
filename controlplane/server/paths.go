package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
)

func goVersion() string { return runtime.Version() }

// lateStreams reaches the fleet, which is made after the apiserver that uses it.
type lateStreams struct{ r *Replica }

func (l lateStreams) Logs(ctx context.Context, node string, q api.LogRequest) (io.ReadCloser, error) {
	return l.r.fleet.Logs(ctx, node, q)
}

func (l lateStreams) Exec(ctx context.Context, node string, q api.ExecRequest, s api.Streams) error {
	return l.r.fleet.Exec(ctx, node, q, s)
}

func (l lateStreams) PortForward(ctx context.Context, node string, pod types.UID, port int32, conn io.ReadWriteCloser) error {
	return l.r.fleet.PortForward(ctx, node, pod, port, conn)
}

type statusAnswer struct {
	Cluster  string         `json:"cluster"`
	Answered string         `json:"answeredBy"`
	Leader   string         `json:"leader"`
	Term     uint64         `json:"term"`
	Revision uint64         `json:"revision"`
	Keys     int            `json:"keys"`
	Bytes    int64          `json:"bytes"`
	Members  []memberAnswer `json:"members"`
}

type memberAnswer struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	Voter   bool   `json:"voter"`
	Leader  bool   `json:"leader"`
	Ready   string `json:"ready"`
}

// serveStatus answers GET /cluster/status; authorization has happened.
func (r *Replica) serveStatus(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodGet {
		http.Error(w, "GET only", http.StatusMethodNotAllowed)
		return
	}
	s := r.store.Status()
	a := statusAnswer{
		Cluster: r.cluster.Name, Answered: r.cfg.Name, Leader: s.Leader, Term: s.Term,
		Revision: uint64(s.Revision), Keys: s.Keys, Bytes: s.Bytes,
	}
	for _, m := range s.Members {
		ready := "yes"
		if !r.peers.Alive(m.ID) {
			ready = "no"
		}
		a.Members = append(a.Members, memberAnswer{m.ID, m.Address, m.Voter, m.ID == s.Leader, ready})
	}
	answer(w, a)
}

// serveTokens answers POST /cluster/tokens {"role", "ttl"}; authorization has happened.
func (r *Replica) serveTokens(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodPost {
		http.Error(w, "POST only", http.StatusMethodNotAllowed)
		return
	}
	var q struct{ Role, TTL string }
	if err := json.NewDecoder(io.LimitReader(req.Body, 4096)).Decode(&q); err != nil {
		http.Error(w, "the body is not JSON: "+err.Error(), http.StatusBadRequest)
		return
	}
	role, life, err := tokenRequest(q.Role, q.TTL)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	t, err := r.newToken(req.Context(), role, life)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	answer(w, map[string]string{"token": t.String()})
}

const maxTokenLife = 365 * 24 * time.Hour

func tokenRequest(role, ttl string) (pki.Role, time.Duration, error) {
	switch pki.Role(role) {
	case pki.RoleNode, pki.RoleControlPlane:
	default:
		return "", 0, fmt.Errorf("role %q: want %s or %s", role, pki.RoleNode, pki.RoleControlPlane)
	}
	life, err := time.ParseDuration(ttl)
	if err != nil {
		return "", 0, fmt.Errorf("ttl %q: want a duration such as 24h", ttl)
	}
	if life <= 0 || life > maxTokenLife {
		return "", 0, errors.New("ttl: want more than 0 and at most 8760h")
	}
	return pki.Role(role), life, nil
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client has gone when this fails
}

package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
)

// What a replica tells of itself for a support bundle, in bytes and time.
const (
	supportMetrics = 2 << 20
	supportAnswer  = 8 << 20
	supportTime    = 10 * time.Second
)

// serveSupport answers POST /cluster/support with what a replica knows of itself. Another replica is asked in the caller's
// place, who was authorized here.
func (r *Replica) serveSupport(w http.ResponseWriter, req *http.Request, d *deed) {
	var q api.ClusterSupport
	raw, ok := postedRaw(w, req, &q)
	if !ok {
		return
	}
	d.object = q.Replica
	ctx, cancel := context.WithTimeout(req.Context(), supportTime)
	defer cancel()
	if q.Replica == "" || q.Replica == r.cfg.Name {
		answer(w, r.support(ctx))
		return
	}
	for _, m := range r.store.Status().Members {
		if m.ID != q.Replica || req.Header.Get(headerForwarded) != "" {
			continue
		}
		resp, err := r.call(ctx, http.MethodPost, m.Address, api.PathClusterSupport, raw, headerRecorded, r.cfg.Name)
		if err != nil {
			refuse(w, http.StatusServiceUnavailable, fmt.Errorf("asking replica %s: %w", m.ID, err))
			return
		}
		defer resp.Body.Close()
		w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
		w.WriteHeader(resp.StatusCode)
		_, _ = io.Copy(w, io.LimitReader(resp.Body, supportAnswer))
		return
	}
	refuse(w, http.StatusNotFound, fmt.Errorf("%q is no member of the group", q.Replica))
}

// support is what this replica knows of itself. No flag is a secret; what its log may hold of one is for the caller to take out.
func (r *Replica) support(ctx context.Context) api.ClusterSupportPart {
	out := api.ClusterSupportPart{Replica: r.cfg.Name, Version: r.cfg.Version, Go: goVersion(), Goroutines: runtime.NumGoroutine(),
		Flags: r.cfg.Flags, Log: string(r.cfg.Recent.Bytes())}
	text, err := r.ownMetrics(ctx)
	if err != nil {
		out.Problem = fmt.Sprintf("its metrics: %v", err)
	}
	out.Metrics = text
	return out
}

// ownMetrics asks this replica's own API, as a monitoring system does.
func (r *Replica) ownMetrics(ctx context.Context) (string, error) {
	resp, err := r.call(ctx, http.MethodGet, datadir.HostPort(r.cfg.Advertise, r.cluster.PeerPort), "/metrics", nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, supportMetrics+1))
	switch {
	case err != nil:
		return "", err
	case resp.StatusCode != http.StatusOK:
		return "", errors.New(resp.Status)
	case len(text) > supportMetrics:
		return string(text[:bytes.LastIndexByte(text[:supportMetrics], '\n')+1]), fmt.Errorf("they are more than %d bytes, and cut off", supportMetrics)
	}
	return string(text), nil
}

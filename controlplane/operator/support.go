package operator

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
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/datadir"
)

// Limits of a replica's part of a support bundle.
const (
	maxMetricsBytes = 2 << 20
	maxSupportBytes = 8 << 20
	supportTimeout  = 10 * time.Second
)

// serveSupport answers POST /cluster/support with a replica's part of a support bundle. It forwards
// a request for another replica to that replica; this replica has authorized the user.
func (v *API) serveSupport(w http.ResponseWriter, req *http.Request, o *operation) {
	var q api.ClusterSupport
	raw, ok := decodeForwardable(w, req, &q)
	if !ok {
		return
	}
	o.object = q.Replica
	ctx, cancel := context.WithTimeout(req.Context(), supportTimeout)
	defer cancel()
	if q.Replica == "" || q.Replica == v.config.Self.Name {
		clusterhttp.WriteJSON(w, v.collectSupportPart(ctx))
		return
	}
	for _, m := range v.config.Store.Status().Members {
		if m.ID != q.Replica || req.Header.Get(clusterhttp.HeaderForwarded) != "" {
			continue
		}
		resp, err := v.config.Peers.SendRequest(ctx, http.MethodPost, m.Address, api.PathClusterSupport, raw,
			clusterhttp.HeaderRecorded, v.config.Self.Name)
		if err != nil {
			clusterhttp.WriteError(w, http.StatusServiceUnavailable,
				fmt.Errorf("forwarding the request to replica %s: %w", m.ID, err))
			return
		}
		copyResponse(w, resp, maxSupportBytes)
		return
	}
	clusterhttp.WriteError(w, http.StatusNotFound, fmt.Errorf("%q is not a member of the cluster", q.Replica))
}

// collectSupportPart returns this replica's part of a support bundle. No flag contains a secret.
// kctl removes secrets from the log messages.
func (v *API) collectSupportPart(ctx context.Context) api.ClusterSupportPart {
	part := api.ClusterSupportPart{Replica: v.config.Self.Name, Version: v.config.Self.Version, Go: runtime.Version(),
		Goroutines: runtime.NumGoroutine(),
		Flags:      v.config.Self.Flags, Log: string(v.config.Self.Recent.Bytes())}
	text, err := v.fetchMetrics(ctx)
	if err != nil {
		part.Problem = fmt.Sprintf("reading the metrics: %v", err)
	}
	part.Metrics = text
	return part
}

// fetchMetrics requests the metrics from this replica's API, like a monitoring system. It truncates
// them to maxMetricsBytes and then also returns an error.
func (v *API) fetchMetrics(ctx context.Context) (string, error) {
	resp, err := v.config.Peers.SendRequest(ctx, http.MethodGet,
		datadir.HostPort(v.config.Self.Advertise, v.config.Cluster.PeerPort), "/metrics", nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxMetricsBytes+1))
	switch {
	case err != nil:
		return "", err
	case resp.StatusCode != http.StatusOK:
		return "", errors.New(resp.Status)
	case len(text) > maxMetricsBytes:
		return string(text[:bytes.LastIndexByte(text[:maxMetricsBytes], '\n')+1]),
			fmt.Errorf("they have more than %d bytes and are truncated", maxMetricsBytes)
	}
	return string(text), nil
}

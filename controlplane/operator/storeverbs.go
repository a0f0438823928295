package operator

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/raftstore"
)

// maxForwardedBytes is the maximum size of the leader's response to a forwarded request.
const maxForwardedBytes = 1 << 20

// serveStepDown answers POST /cluster/step-down: the leader transfers its leadership to the member
// that the request names, or to any suitable member.
func (v *API) serveStepDown(w http.ResponseWriter, req *http.Request, o *operation) {
	var q api.ClusterStepDown
	if !decodePost(w, req, &q) {
		return
	}
	o.object = q.To
	ctx, cancel := context.WithTimeout(req.Context(), changeTimeout)
	defer cancel()
	previous := v.config.Store.Status().Leader
	o.attributes = []any{"leader", previous}
	if q.To != "" && q.To == previous {
		clusterhttp.WriteError(w, http.StatusBadRequest, fmt.Errorf("replica %q leads already", q.To))
		return
	}
	leader, err := v.config.Store.StepDown(ctx, q.To)
	if err != nil {
		writeError(w, err)
		return
	}
	o.object = leader
	clusterhttp.WriteJSON(w, api.ClusterStepDownResult{From: previous, To: leader})
}

// serveCompact answers POST /cluster/compact: the leader discards the watch history up to the
// requested revision, by default all of it. Another replica forwards the request to the leader.
func (v *API) serveCompact(w http.ResponseWriter, req *http.Request, o *operation) {
	var q api.ClusterCompact
	raw, ok := decodeForwardable(w, req, &q)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), changeTimeout)
	defer cancel()
	current, err := v.config.Store.Sync(ctx)
	if err != nil {
		writeError(w, err)
		return
	}
	upTo := raftstore.Revision(q.Revision)
	o.object = fmt.Sprintf("revision %d", upTo)
	switch {
	case upTo > current:
		clusterhttp.WriteError(w, http.StatusBadRequest,
			fmt.Errorf("--revision %d is in the future: the store is at %d", upTo, current))
		return
	case upTo == 0:
		upTo = current
		o.object = fmt.Sprintf("revision %d", upTo)
	}
	if upTo > v.config.Store.Status().Compacted {
		err = v.config.Store.Compact(ctx, upTo)
	}
	if errors.Is(err, raftstore.ErrNotLeader) && req.Header.Get(clusterhttp.HeaderForwarded) == "" {
		v.forwardToLeader(ctx, w, req, raw)
		return
	}
	if err == nil {
		_, err = v.config.Store.Sync(ctx)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	s := v.config.Store.Status()
	clusterhttp.WriteJSON(w, api.ClusterCompactResult{Compacted: uint64(s.Compacted), HistoryBytes: s.HistoryBytes})
}

// forwardToLeader sends a request to the leader and answers it with the leader's response. This
// replica has authorized the user, and sends the request with its own certificate.
func (v *API) forwardToLeader(ctx context.Context, w http.ResponseWriter, req *http.Request, body []byte) {
	s := v.config.Store.Status()
	for _, m := range s.Members {
		if m.ID != s.Leader || m.ID == v.config.Self.Name {
			continue
		}
		resp, err := v.config.Peers.SendRequest(ctx, req.Method, m.Address, req.URL.Path, body,
			clusterhttp.HeaderRecorded,
			v.config.Self.Name)
		if err != nil {
			clusterhttp.WriteError(w, http.StatusServiceUnavailable,
				fmt.Errorf("forwarding the request to the leader %s: %w", m.ID, err))
			return
		}
		copyResponse(w, resp, maxForwardedBytes)
		return
	}
	writeError(w, raftstore.ErrUnavailable)
}

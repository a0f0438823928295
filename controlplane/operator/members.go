package operator

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
)

// changeTimeout is the timeout of a change of the members, of the keys or of the watch history.
const changeTimeout = 30 * time.Second

// serveMembers answers GET /cluster/members with the status of all members. A joining replica sends
// POST /cluster/members, which adds it to the cluster.
func (v *API) serveMembers(w http.ResponseWriter, req *http.Request, o *operation) {
	if !requireMethod(w, req, http.MethodGet, http.MethodPost) {
		return
	}
	if req.Method == http.MethodGet {
		clusterhttp.WriteJSON(w, v.Status(req.Context(), false).Members)
		return
	}
	var q api.ClusterJoin
	if !decodePost(w, req, &q) {
		return
	}
	o.object, o.attributes = q.Name, []any{"address", q.Address}
	if q.Name == "" || q.Address == "" {
		clusterhttp.WriteError(w, http.StatusBadRequest,
			errors.New("a member needs a name and an address: run 'keelson-controlplane join' on its machine"))
		return
	}
	if q.Standby {
		o.attributes = append(o.attributes, "standby", true)
	}
	ctx, cancel := context.WithTimeout(req.Context(), changeTimeout)
	defer cancel()
	if err := v.config.Members.AddMember(ctx, q.Name, q.Address, q.Standby); err != nil {
		writeError(w, err)
		return
	}
	clusterhttp.WriteJSON(w, q)
}

// serveMember answers GET /cluster/members/NAME with the state of that member. A replica sends this
// request to check whether it is still a member. DELETE removes the member. The leader refuses a
// removal after which there would be no quorum, because the removal itself could not be committed.
func (v *API) serveMember(w http.ResponseWriter, req *http.Request, o *operation) {
	o.object = strings.TrimPrefix(req.URL.Path, api.PathClusterMembers+"/")
	if !requireMethod(w, req, http.MethodDelete, http.MethodGet) {
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), changeTimeout)
	defer cancel()
	if req.Method == http.MethodGet {
		m, err := v.config.Members.FindMember(ctx, o.object)
		if err != nil {
			writeError(w, err)
			return
		}
		clusterhttp.WriteJSON(w, v.describeMember(m, v.config.Store.Status(), time.Now()))
		return
	}
	if err := v.config.Members.RemoveMember(ctx, o.object, api.CallerOf(req.Context()).User.Name); err != nil {
		writeError(w, err)
		return
	}
	clusterhttp.WriteJSON(w, map[string]string{"removed": o.object})
}

// serveHeartbeats answers GET /cluster/heartbeats with the times, in milliseconds since 1970, at
// which this replica received the last heartbeat of each node.
func (v *API) serveHeartbeats(w http.ResponseWriter, req *http.Request) {
	if !requireMethod(w, req, http.MethodGet) {
		return
	}
	out := map[string]int64{}
	for node, t := range v.config.Nodes.Heartbeats() {
		out[node] = t.UnixMilli()
	}
	clusterhttp.WriteJSON(w, out)
}

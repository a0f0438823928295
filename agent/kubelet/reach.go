package kubelet

import (
	"context"
	"encoding/json"
	"net/http"
)

// Reachability reports whether the node can reach a host outside of the cluster.
type Reachability struct {
	Addresses []string `json:"addresses,omitempty"` // addresses of a name
	// Unresolved states why the name has no address, NoRoute why there is no route to the address;
	// "" = no problem.
	Unresolved string `json:"unresolved,omitempty"`
	NoRoute    string `json:"noRoute,omitempty"`
}

// reachPath is the URL path at which the Reachability of a name or address is served. The URL
// parameter host specifies the name or address. 'kctl net trace' uses it.
const reachPath = "/keelson/reach"

// maxHostLength is the maximum length of a DNS name.
const maxHostLength = 253

func (s *Server) serveReach(w http.ResponseWriter, r *http.Request) {
	host := r.URL.Query().Get("host")
	if host == "" || len(host) > maxHostLength {
		http.Error(w, "host: want a name or an address of at most 253 characters", http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
	defer cancel()
	raw, err := json.Marshal(s.cfg.Reach(ctx, host))
	if err == nil {
		w.Header().Set("Content-Type", "application/json")
		_, err = w.Write(raw)
	}
	s.logUnfinished(r, err)
}

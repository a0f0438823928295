package kubelet

import (
	"context"
	"encoding/json"
	"net/http"
)

// Reach reports whether the node reaches a host outside of the cluster.
type Reach struct {
	Addresses []string `json:"addresses,omitempty"` // of a name
	// Unresolved is why the name has no address, NoRoute why there is no route to the address; "" = no problem.
	Unresolved string `json:"unresolved,omitempty"`
	NoRoute    string `json:"noRoute,omitempty"`
}

// reachPath answers for one name or address, in the parameter host. 'kctl net trace' reads it.
const reachPath = "/keelson/reach"

// longestHost is the length of the longest DNS name.
const longestHost = 253

func (s *Server) reach(w http.ResponseWriter, r *http.Request) {
	host := r.URL.Query().Get("host")
	if host == "" || len(host) > longestHost {
		http.Error(w, "host: want a name or an address of at most 253 characters", http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	raw, err := json.Marshal(s.cfg.Reach(ctx, host))
	if err == nil {
		w.Header().Set("Content-Type", "application/json")
		_, err = w.Write(raw)
	}
	s.ended(r, err)
}

package kubelet

import (
	"encoding/json"
	"maps"
	"net/http"
)

// configzPath is the URL path at which the node's KubeletConfiguration is served.
const configzPath = "/configz"

// serveConfigz writes the KubeletConfiguration of the node as JSON, in the form of the kubelet:
// {"kubeletconfig": {...}}.
func (s *Server) serveConfigz(w http.ResponseWriter, r *http.Request) {
	raw, err := json.Marshal(map[string]any{"kubeletconfig": s.completeConfiguration()})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, err = w.Write(raw)
	s.logUnfinished(r, err)
}

// completeConfiguration returns Config.Configuration with the settings of this server.
func (s *Server) completeConfiguration() map[string]any {
	all := maps.Clone(s.cfg.Configuration())
	maps.Copy(all, map[string]any{
		"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1",
		"enableServer": true, "readOnlyPort": 0, "healthzPort": 0, "tlsMinVersion": "VersionTLS12",
		"enableDebuggingHandlers": false, "enableProfilingHandler": false, "enableDebugFlagsHandler": false,
		"enableSystemLogHandler": false, "enableSystemLogQuery": false, "enableContentionProfiling": false,
		"authentication": map[string]any{"anonymous": map[string]any{"enabled": false}, "x509": map[string]any{},
			"webhook": map[string]any{"enabled": true, "cacheTTL": allowedFor.String()}},
		"authorization": map[string]any{"mode": "Webhook", "webhook": map[string]any{
			"cacheAuthorizedTTL": allowedFor.String(), "cacheUnauthorizedTTL": refusedFor.String()}},
	})
	return all
}

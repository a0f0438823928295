package kubelet

import (
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"

	kubeletv1beta1 "k8s.io/kubelet/config/v1beta1"
)

// decodeConfigz decodes a response of /configz strictly, with the types of Kubernetes.
func decodeConfigz(t *testing.T, text string) (out struct {
	KubeletConfig kubeletv1beta1.KubeletConfiguration `json:"kubeletconfig"`
}) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&out); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return out
}

// The response is a KubeletConfiguration with the settings of the server and those of the agent.
// F133
func TestConfigz(t *testing.T) {
	s := New(Config{Configuration: func() map[string]any { return map[string]any{"maxPods": 7} }})
	w := httptest.NewRecorder()
	s.serveConfigz(w, httptest.NewRequest("GET", configzPath, nil))
	got := decodeConfigz(t, w.Body.String()).KubeletConfig
	if got.Kind != "KubeletConfiguration" || got.APIVersion != "kubelet.config.k8s.io/v1beta1" || got.MaxPods != 7 ||
		w.Header().Get("Content-Type") != "application/json" {
		t.Errorf("%s %s", w.Header().Get("Content-Type"), w.Body.String())
	}
	if a := got.Authentication; *a.Anonymous.Enabled || !*a.Webhook.Enabled ||
		a.Webhook.CacheTTL.Duration != allowedFor ||
		got.Authorization.Mode != kubeletv1beta1.KubeletAuthorizationModeWebhook ||
		got.Authorization.Webhook.CacheUnauthorizedTTL.Duration != refusedFor || *got.EnableDebuggingHandlers {
		t.Errorf("access: %s", w.Body.String())
	}
}

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// healthCheck is a named health check. run returns an error with the reason if the check fails.
type healthCheck struct {
	name string
	run  func(ctx context.Context) error
}

// readyTimeout limits the duration of a health request, so that a check that hangs does not make
// the probe hang.
const readyTimeout = 2 * time.Second

// storeCheck is the name under which kube-apiserver reports the health of its store.
const storeCheck = "etcd"

// healthChecks serves the health endpoints of a server.
type healthChecks struct{ server *Server }

// livenessChecks returns the checks of /livez. They fail only if a restart would help.
func (h healthChecks) livenessChecks() []healthCheck {
	return []healthCheck{{"ping", func(context.Context) error { return nil }}}
}

// readinessChecks returns the checks of /readyz. A failure means that this replica must not receive
// traffic.
func (h healthChecks) readinessChecks() []healthCheck {
	return append(h.livenessChecks(),
		healthCheck{"registry", func(context.Context) error {
			return requireClosed(h.server.cfg.Registry.Ready(), "the watch cache is still being filled")
		}},
		healthCheck{"authorizer", func(context.Context) error {
			return requireClosed(h.server.pipeline.ready, "the authorization rules are still being read")
		}},
		healthCheck{"custom-resources", func(context.Context) error {
			return requireClosed(h.server.definitions.Ready(), "the custom resource definitions are still being read")
		}},
		healthCheck{"replica", func(ctx context.Context) error {
			if h.server.cfg.State.Ready == nil {
				return nil
			}
			return h.server.cfg.State.Ready(ctx)
		}},
		healthCheck{"shutdown", func(context.Context) error {
			if h.server.lifetime.closing.Err() != nil {
				return errors.New("this replica is shutting down")
			}
			return nil
		}},
	)
}

func requireClosed(c <-chan struct{}, otherwise string) error {
	if isClosed(c) {
		return nil
	}
	return errors.New(otherwise)
}

// kubernetesChecks returns checks under the names of kube-apiserver's health checks. Each of them
// runs the corresponding check of this server. They can be requested by name and excluded. Reports
// of all checks contain only the checks under this server's own names.
func (h healthChecks) kubernetesChecks() []healthCheck {
	store := func(ctx context.Context) error {
		if err := requireClosed(h.server.cfg.Registry.Ready(), "the watch cache is still being filled"); err != nil ||
			h.server.cfg.State.Ready == nil {
			return err
		}
		return h.server.cfg.State.Ready(ctx)
	}
	registry := func(context.Context) error {
		return requireClosed(h.server.cfg.Registry.Ready(), "the watch cache is still being filled")
	}
	rules := func(context.Context) error {
		return requireClosed(h.server.pipeline.ready, "the authorization rules are still being read")
	}
	custom := func(context.Context) error {
		return requireClosed(h.server.definitions.Ready(), "the custom resource definitions are still being read")
	}
	const hook = "poststarthook/"
	return []healthCheck{
		{storeCheck, store}, {"etcd-readiness", store}, {"informer-sync", registry},
		{hook + "generic-apiserver-start-informers", registry},
		{hook + "start-kube-apiserver-admission-initializer", registry},
		{hook + "priority-and-fairness-config-consumer", registry},
		{hook + "priority-and-fairness-config-producer", registry},
		{hook + "priority-and-fairness-filter", registry},
		{hook + "storage-object-count-tracker-hook", registry},
		{hook + "start-cluster-authentication-info-controller", registry},
		{hook + "start-service-ip-repair-controllers", registry},
		{hook + "start-system-namespaces-controller", registry},
		{hook + "start-legacy-token-tracking-controller", registry},
		{hook + "bootstrap-controller", registry},
		{hook + "scheduling/bootstrap-system-priority-classes", registry},
		{hook + "rbac/bootstrap-roles", rules},
		{hook + "crd-informer-synced", custom},
		{hook + "start-apiextensions-informers", custom},
		{hook + "start-apiextensions-controllers", custom},
		{hook + "aggregator-reload-proxy-client-cert", registry},
		{hook + "start-kube-aggregator-informers", registry},
		{hook + "apiservice-registration-controller", registry},
		{hook + "apiservice-discovery-controller", registry},
		{hook + "apiservice-status-local-available-controller", registry},
		{hook + "apiservice-status-remote-available-controller", registry},
		{hook + "apiservice-openapi-controller", registry},
		{hook + "apiservice-openapiv3-controller", registry},
		{hook + "kube-apiserver-autoregistration", registry},
	}
}

// serveHealth serves /healthz, /livez and /readyz without authentication, because a load balancer
// has no credentials. It returns false for other paths.
func (h healthChecks) serveHealth(w http.ResponseWriter, r *http.Request) bool {
	base, one, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	var checks []healthCheck
	switch base {
	case healthzEndpoint, livezEndpoint:
		checks = h.livenessChecks()
	case readyzEndpoint:
		checks = h.readinessChecks()
	default:
		return false
	}
	ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
	defer cancel()
	excluded := map[string]bool{}
	if one == "" {
		for _, name := range r.URL.Query()["exclude"] {
			excluded[name] = true
		}
	}
	if one != "" || len(excluded) > 0 {
		known := h.kubernetesChecks()
		if one != "" {
			checks = append(checks, known...)
		}
		for _, c := range known {
			delete(excluded, c.name)
		}
	}
	var report strings.Builder
	failed, found := false, one == ""
	for _, c := range checks {
		if one != "" && c.name != one {
			continue
		}
		found = true
		if excluded[c.name] {
			delete(excluded, c.name)
			fmt.Fprintf(&report, "[+]%s excluded: ok\n", c.name)
			continue
		}
		if err := h.runCheck(ctx, base, c); err != nil {
			failed = true
			fmt.Fprintf(&report, "[-]%s failed: %v\n", c.name, err)
			continue
		}
		fmt.Fprintf(&report, "[+]%s ok\n", c.name)
	}
	if len(excluded) > 0 {
		fmt.Fprintf(&report, "warn: some health checks cannot be excluded: no matches for %s\n", quoteNames(excluded))
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, verbose := r.URL.Query()["verbose"]
	switch {
	case !found:
		w.WriteHeader(http.StatusNotFound)
	case failed:
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprintf(w, "%s%s check failed\n", report.String(), base)
	case verbose:
		fmt.Fprintf(w, "%s%s check passed\n", report.String(), base)
	default:
		fmt.Fprint(w, "ok")
	}
	return true
}

// quoteNames returns the sorted, quoted names. The length of the URL limits their number.
func quoteNames(names map[string]bool) string {
	out := slices.Sorted(maps.Keys(names))
	for i, n := range out {
		out[i] = strconv.Quote(n)
	}
	return strings.Join(out, ",")
}

// newStatus returns an API error with an HTTP code for requests that are not about a resource.
func newStatus(code int32, reason metav1.StatusReason, message string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: code, Reason: reason, Message: message, Details: &metav1.StatusDetails{},
	}}
}

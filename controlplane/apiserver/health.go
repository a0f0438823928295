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

// check is a named health check. run returns the reason of a failure.
type check struct {
	name string
	run  func(ctx context.Context) error
}

// readyTimeout limits the time of a health request, so that a hanging check does not hang the
// probe.
const readyTimeout = 2 * time.Second

// livenessChecks returns the checks of /livez. They fail only if a restart would help.
func (s *Server) livenessChecks() []check {
	return []check{{"ping", func(context.Context) error { return nil }}}
}

// readinessChecks returns the checks of /readyz. A failure means that this replica must not receive
// traffic.
func (s *Server) readinessChecks() []check {
	return append(s.livenessChecks(),
		check{"registry", func(context.Context) error {
			return closed(s.cfg.Registry.Ready(), "the watch cache is still being filled")
		}},
		check{"authorizer", func(context.Context) error { return closed(s.ready, "the authorization rules are still being read") }},
		check{"custom-resources", func(context.Context) error {
			return closed(s.custom.Ready(), "the custom resource definitions are still being read")
		}},
		check{"replica", func(ctx context.Context) error {
			if s.cfg.Ready == nil {
				return nil
			}
			return s.cfg.Ready(ctx)
		}},
		check{"shutdown", func(context.Context) error {
			if s.closing.Err() != nil {
				return errors.New("this replica is shutting down")
			}
			return nil
		}},
	)
}

func closed(c <-chan struct{}, otherwise string) error {
	if isClosed(c) {
		return nil
	}
	return errors.New(otherwise)
}

// kubernetesChecks returns checks under the names of kube-apiserver's health checks, each backed by
// the counterpart in this server. They can be requested by name and excluded. Reports of all checks
// contain only Keelson's own checks.
func (s *Server) kubernetesChecks() []check {
	store := func(ctx context.Context) error {
		if err := closed(s.cfg.Registry.Ready(), "the watch cache is still being filled"); err != nil || s.cfg.Ready == nil {
			return err
		}
		return s.cfg.Ready(ctx)
	}
	registry := func(context.Context) error {
		return closed(s.cfg.Registry.Ready(), "the watch cache is still being filled")
	}
	rules := func(context.Context) error { return closed(s.ready, "the authorization rules are still being read") }
	custom := func(context.Context) error {
		return closed(s.custom.Ready(), "the custom resource definitions are still being read")
	}
	const hook = "poststarthook/"
	return []check{
		{"etcd", store}, {"etcd-readiness", store}, {"informer-sync", registry},
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

// health serves /healthz, /livez and /readyz without authentication, because a load balancer has no
// credentials. It returns false for other paths.
func (s *Server) health(w http.ResponseWriter, r *http.Request) bool {
	base, one, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	var checks []check
	switch base {
	case "healthz", "livez":
		checks = s.livenessChecks()
	case "readyz":
		checks = s.readinessChecks()
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
		known := s.kubernetesChecks()
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
		if err := c.run(ctx); err != nil {
			failed = true
			fmt.Fprintf(&report, "[-]%s failed: %v\n", c.name, err)
			continue
		}
		fmt.Fprintf(&report, "[+]%s ok\n", c.name)
	}
	if len(excluded) > 0 {
		fmt.Fprintf(&report, "warn: some health checks cannot be excluded: no matches for %s\n", quoted(excluded))
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

// quoted returns the sorted, quoted names. The length of the URL limits their number.
func quoted(names map[string]bool) string {
	out := slices.Sorted(maps.Keys(names))
	for i, n := range out {
		out[i] = strconv.Quote(n)
	}
	return strings.Join(out, ",")
}

// status returns an API error with an HTTP code for requests that are not about a resource.
func status(code int32, reason metav1.StatusReason, message string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: code, Reason: reason, Message: message, Details: &metav1.StatusDetails{},
	}}
}

package aggregation

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/apiserver/dialer"
)

// checkAttempts is how many discovery requests must fail before a server counts as unavailable.
// They may reach different endpoints.
const checkAttempts = 5

// Check checks whether the API server of an APIService is available and returns its Available
// condition. It reads the Service and EndpointSlices from cluster, and then requests the discovery
// document of the server.
func (l *Layer) Check(
	ctx context.Context, cluster dialer.Cluster, s *apiregistrationv1.APIService,
) apiregistrationv1.APIServiceCondition {
	c := apiregistrationv1.APIServiceCondition{Type: apiregistrationv1.Available,
		LastTransitionTime: metav1.NewTime(l.cfg.Clock())}
	c.Status, c.Reason, c.Message = apiregistrationv1.ConditionFalse, "", ""
	if c.Reason, c.Message = unavailableReason(ctx, cluster, &s.Spec); c.Reason != "" {
		return c
	}
	if err := l.reachServer(ctx, l.remoteFor(s)); err != nil {
		c.Reason, c.Message = "FailedDiscoveryCheck", err.Error()
		return c
	}
	c.Status, c.Reason, c.Message = apiregistrationv1.ConditionTrue, "Passed", "all checks passed"
	return c
}

// unavailableReason returns the reason and message why the Service cannot receive requests: the
// Service, its port or its ready endpoints are missing. Both are "" if nothing is missing.
func unavailableReason(ctx context.Context, cluster dialer.Cluster, spec *apiregistrationv1.APIServiceSpec) (
	reason, message string,
) {
	namespace, name := spec.Service.Namespace, spec.Service.Name
	o, _ := cluster.Get(ctx, "services", namespace, name)
	svc, ok := o.(*corev1.Service)
	if !ok {
		return "ServiceNotFound", fmt.Sprintf("service/%s in %q is not present", name, namespace)
	}
	if svc.Spec.Type != corev1.ServiceTypeClusterIP && svc.Spec.Type != "" {
		return "", ""
	}
	var found *corev1.ServicePort
	for i := range svc.Spec.Ports {
		if svc.Spec.Ports[i].Port == servicePort(spec) {
			found = &svc.Spec.Ports[i]
		}
	}
	if found == nil {
		return "ServicePortError", fmt.Sprintf("service/%s in %q is not listening on port %d", name, namespace,
			servicePort(spec))
	}
	all, err := cluster.List(ctx, "endpointslices", namespace, false)
	if err != nil {
		return "EndpointsAccessError", fmt.Sprintf("service/%s in %q cannot be checked due to: %v", name,
			namespace, err)
	}
	seen, ready := false, false
	for _, o := range all {
		if es, ok := o.(*discoveryv1.EndpointSlice); ok && es.Labels[discoveryv1.LabelServiceName] == name {
			seen = true
			ready = ready || hasReadyEndpoint(es, found.Name)
		}
	}
	switch {
	case !seen:
		return "EndpointsNotFound", fmt.Sprintf("cannot find endpointslices for service/%s in %q", name, namespace)
	case !ready:
		return "MissingEndpoints",
			fmt.Sprintf("endpointslices for service/%s in %q have no addresses with port name %q", name,
				namespace, found.Name)
	}
	return "", ""
}

func hasReadyEndpoint(es *discoveryv1.EndpointSlice, portName string) bool {
	ready := false
	for _, e := range es.Endpoints {
		ready = ready || e.Conditions.Ready == nil || *e.Conditions.Ready
	}
	for _, p := range es.Ports {
		if ready && p.Port != nil && (p.Name == nil && portName == "" || p.Name != nil && *p.Name == portName) {
			return true
		}
	}
	return false
}

// reachServer requests the discovery document until one of the attempts succeeds. If the first
// request fails or takes longer than hedgeDelay, it sends the remaining attempts concurrently. It
// returns nil at the first success, and otherwise the last error. All attempts share the time limit
// requestTimeout.
func (l *Layer) reachServer(ctx context.Context, r *remote) error {
	if r.err != nil {
		return r.err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	results := make(chan error, checkAttempts)
	ask := func() { results <- requestDiscovery(ctx, r) }
	go ask()
	long := time.NewTimer(hedgeDelay)
	defer long.Stop()
	for asked, answered := 1, 0; ; {
		var err error
		select {
		case err = <-results:
			if answered++; err == nil || answered == checkAttempts {
				return err
			}
		case <-long.C:
		}
		for ; asked < checkAttempts; asked++ {
			go ask()
		}
	}
}

// hedgeDelay is how long the first request may take before further requests are sent, which may
// reach a faster endpoint.
const hedgeDelay = time.Second

func requestDiscovery(ctx context.Context, r *remote) error {
	_, err := r.fetchDocument(ctx, r.discoveryPath(), "application/json", availabilityUser, 0)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("timed out waiting for %s%s", r.base.String(), r.discoveryPath())
	}
	return err
}

// SetCondition returns conditions with the condition c in place of the condition of the same type.
// The second result reports whether the condition changed. A different time is not a change, nor is
// a different message of a failed discovery check.
func SetCondition(conditions []apiregistrationv1.APIServiceCondition, c apiregistrationv1.APIServiceCondition) (
	[]apiregistrationv1.APIServiceCondition, bool,
) {
	out := append([]apiregistrationv1.APIServiceCondition(nil), conditions...)
	for i := range out {
		if out[i].Type != c.Type {
			continue
		}
		if out[i].Status == c.Status {
			c.LastTransitionTime = out[i].LastTransitionTime
		}
		changed := out[i].Status != c.Status || out[i].Reason != c.Reason
		if c.Reason != "FailedDiscoveryCheck" { // these messages contain ports and endpoints that differ at each check
			changed = changed || out[i].Message != c.Message
		}
		out[i] = c
		return out, changed
	}
	return append(out, c), true
}

// Intervals between availability checks. After a failure, the next check follows soon because the
// server may just be starting. The interval doubles with each further failure.
const (
	period    = 30 * time.Second
	minPeriod = 250 * time.Millisecond
	maxPeriod = 2 * time.Minute
)

// NextCheckDelay returns the time until the next check. failures is the number of failed checks in
// a row since the last change of the APIService or its Service.
func NextCheckDelay(failures int) time.Duration {
	if failures == 0 {
		return period
	}
	return min(minPeriod<<min(failures-1, 16), maxPeriod)
}

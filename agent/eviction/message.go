package eviction

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Message is what the status of a pod says that was evicted: what the node was short of, and which containers have more
// than they requested. The sentences are those that people look for who come from Kubernetes.
func Message(s Signal, l Level, c Candidate) string {
	var b strings.Builder
	fmt.Fprintf(&b, "The node was low on resource: %s. Threshold quantity: %s, available: %s. ", s.Resource(), quantity(l.Floor), kibi(l.Left))
	for _, u := range c.Containers {
		if u.Used > u.Request {
			fmt.Fprintf(&b, "Container %s was using %s, request is %s, has larger consumption of %s. ", u.Name, kibi(u.Used), quantity(u.Request), s.Resource())
		}
	}
	if s == Disk { // of which volumes are a large part, and no container's
		fmt.Fprintf(&b, "With its volumes the pod was using %s, request is %s. ", kibi(c.Used), quantity(c.Request))
	}
	return b.String()
}

// quantity writes bytes as they were set.
func quantity(bytes int64) string { return resource.NewQuantity(bytes, resource.BinarySI).String() }

// kibi writes bytes that were measured.
func kibi(bytes int64) string { return quantity(max(0, bytes) &^ 1023) }

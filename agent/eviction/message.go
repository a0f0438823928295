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
	fmt.Fprintf(&b, "The node was low on resource: %s. Threshold quantity: %s, available: %s. ", s.Resource(), s.quantity(l.Floor), s.measured(l.Left))
	for _, u := range c.Containers {
		if u.Used > u.Request {
			fmt.Fprintf(&b, "Container %s was using %s, request is %s, has larger consumption of %s. ", u.Name, s.measured(u.Used), s.quantity(u.Request), s.Resource())
		}
	}
	switch s { // of a disk volumes are a large part, and no container's
	case Disk:
		fmt.Fprintf(&b, "With its volumes the pod was using %s, request is %s. ", s.measured(c.Used), s.quantity(c.Request))
	case Inodes:
		fmt.Fprintf(&b, "With its volumes the pod was using %s. ", s.measured(c.Used))
	}
	return b.String()
}

// quantity writes what was set.
func (s Signal) quantity(n int64) string {
	if s == Inodes {
		return resource.NewQuantity(n, resource.DecimalSI).String()
	}
	return resource.NewQuantity(n, resource.BinarySI).String()
}

// measured writes what was measured, of bytes whole kibibytes.
func (s Signal) measured(n int64) string {
	if n = max(0, n); s != Inodes {
		n &^= 1023
	}
	return s.quantity(n)
}

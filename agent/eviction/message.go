package eviction

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Message returns the status message of an evicted pod in the words of Kubernetes. It names the
// scarce resource, and the pod's containers that use more of it than they requested.
func Message(s Signal, l Level, c Candidate) string {
	var b strings.Builder
	fmt.Fprintf(&b, "The node was low on resource: %s. Threshold quantity: %s, available: %s. ", s.Resource(),
		s.formatQuantity(l.Floor), s.formatMeasured(l.Left))
	for _, u := range c.Containers {
		if u.Used > u.Request {
			fmt.Fprintf(&b, "Container %s was using %s, request is %s, has larger consumption of %s. ", u.Name,
				s.formatMeasured(u.Used), s.formatQuantity(u.Request), s.Resource())
		}
	}
	switch s { // volumes are a large part of a pod's disk usage and belong to no container
	case Disk:
		fmt.Fprintf(&b, "With its volumes the pod was using %s, request is %s. ", s.formatMeasured(c.Used),
			s.formatQuantity(c.Request))
	case Inodes:
		fmt.Fprintf(&b, "With its volumes the pod was using %s. ", s.formatMeasured(c.Used))
	}
	return b.String()
}

// formatQuantity formats a configured amount of the signal's resource, such as a request or
// threshold.
func (s Signal) formatQuantity(n int64) string {
	if s == Inodes {
		return resource.NewQuantity(n, resource.DecimalSI).String()
	}
	return resource.NewQuantity(n, resource.BinarySI).String()
}

// formatMeasured formats a measured amount of the signal's resource. Bytes are rounded down to
// kibibytes.
func (s Signal) formatMeasured(n int64) string {
	if n = max(0, n); s != Inodes {
		n &^= 1023
	}
	return s.formatQuantity(n)
}

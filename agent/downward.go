package agent

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"keelson.dev/keelson/internal/saturate"
)

// FieldValue returns the value of a pod's field for the downward API, in the format of environment
// variables and downwardAPI volumes. path is the fieldPath. The error for an unknown path names the
// path. FieldValue is pure.
func FieldValue(pod *v1.Pod, path string) (string, error) {
	if field, key, ok := splitSubscript(path); ok {
		switch field {
		case "metadata.labels":
			return pod.Labels[key], nil
		case "metadata.annotations":
			return pod.Annotations[key], nil
		}
		return "", fmt.Errorf("fieldPath %q does not support subscript", path)
	}
	switch path {
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "metadata.uid":
		return string(pod.UID), nil
	case "metadata.labels":
		return formatMap(pod.Labels), nil
	case "metadata.annotations":
		return formatMap(pod.Annotations), nil
	case "spec.nodeName", "spec.host": // spec.host is the deprecated name of spec.nodeName
		return pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, nil
	case "status.hostIP":
		return pod.Status.HostIP, nil
	case "status.hostIPs":
		var ips []string
		for _, ip := range pod.Status.HostIPs {
			ips = append(ips, ip.IP)
		}
		return strings.Join(ips, ","), nil
	case "status.podIP":
		return pod.Status.PodIP, nil
	case "status.podIPs":
		var ips []string
		for _, ip := range pod.Status.PodIPs {
			ips = append(ips, ip.IP)
		}
		return strings.Join(ips, ","), nil
	}
	return "", fmt.Errorf("unsupported fieldPath: %v", path)
}

// splitSubscript splits a path such as "metadata.labels['key']" into the field and the key. ok is
// false if the path has no subscript.
func splitSubscript(path string) (field, key string, ok bool) {
	open := strings.Index(path, "['")
	if open < 0 || !strings.HasSuffix(path, "']") || open+2 > len(path)-2 {
		return "", "", false
	}
	return path[:open], path[open+2 : len(path)-2], true
}

// formatMap formats a map as lines key="value", sorted by key.
func formatMap(m map[string]string) string {
	lines := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		lines = append(lines, k+"="+strconv.Quote(m[k]))
	}
	return strings.Join(lines, "\n")
}

// ResourceValue returns the container resource that ref selects for the downward API, divided by
// the divisor and rounded up. defaultContainer is used if ref names no container. A request that is
// not set equals the limit. A limit that is not set is that of the pod, or else the node's
// allocatable amount. ResourceValue is pure.
func ResourceValue(pod *v1.Pod, defaultContainer string, ref *v1.ResourceFieldSelector, allocatable v1.ResourceList) (
	string, error,
) {
	name := ref.ContainerName
	if name == "" {
		name = defaultContainer
	}
	var spec *v1.Container
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if list[i].Name == name {
				spec = &list[i]
			}
		}
	}
	for i := range pod.Spec.EphemeralContainers {
		if c := (*v1.Container)(&pod.Spec.EphemeralContainers[i].EphemeralContainerCommon); c.Name == name {
			spec = c
		}
	}
	if spec == nil {
		return "", fmt.Errorf("container %s not found", name)
	}
	kind, res, ok := strings.Cut(ref.Resource, ".")
	if !ok {
		return "", fmt.Errorf("unsupported container resource : %v", ref.Resource)
	}
	var q resource.Quantity
	switch kind {
	case "requests":
		q = spec.Resources.Requests[v1.ResourceName(res)]
		if _, set := spec.Resources.Requests[v1.ResourceName(res)]; !set {
			q = spec.Resources.Limits[v1.ResourceName(res)]
		}
	case "limits":
		q = spec.Resources.Limits[v1.ResourceName(res)]
		if q.IsZero() && pod.Spec.Resources != nil {
			q = pod.Spec.Resources.Limits[v1.ResourceName(res)]
		}
		if q.IsZero() {
			q = allocatable[v1.ResourceName(res)]
		}
	default:
		return "", fmt.Errorf("unsupported container resource : %v", ref.Resource)
	}
	div := ref.Divisor
	if div.IsZero() {
		div = resource.MustParse("1")
	}
	if res == string(v1.ResourceCPU) {
		d := saturate.MilliValue(&div)
		return strconv.FormatInt(saturate.Add(saturate.MilliValue(&q), d-1)/d, 10), nil
	}
	d := saturate.Value(&div)
	return strconv.FormatInt(saturate.Add(saturate.Value(&q), d-1)/d, 10), nil
}

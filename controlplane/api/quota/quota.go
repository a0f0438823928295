// Package quota computes how much of a ResourceQuota the objects of its namespace use, as
// Kubernetes does. Its functions are pure functions of a quota and an object. Admission and the
// controller that recounts the usage share them.
package quota

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Resources with objects that use more than an object count.
var (
	Pods     = schema.GroupResource{Resource: "pods"}
	Claims   = schema.GroupResource{Resource: "persistentvolumeclaims"}
	Services = schema.GroupResource{Resource: "services"}
	Devices  = schema.GroupResource{Group: resourcev1.GroupName, Resource: "resourceclaims"}
)

// IsUsageVariable reports whether an update of an object can change its usage. Objects of other
// resources have a constant usage.
func IsUsageVariable(gr schema.GroupResource) bool {
	return gr == Pods || gr == Claims || gr == Services
}

const (
	countPrefix   = "count/"
	requestPrefix = corev1.DefaultResourceRequestsPrefix
	classSuffix   = ".storageclass.storage.k8s.io/"
	devicesSuffix = corev1.ResourceClaimsPerClass
)

// shortNames maps names of object counts, such as "pods", to their resources. These names are older
// than count/RESOURCE.GROUP.
var shortNames = map[corev1.ResourceName]schema.GroupResource{
	corev1.ResourcePods:                   Pods,
	corev1.ResourceServices:               Services,
	corev1.ResourceServicesNodePorts:      Services,
	corev1.ResourceServicesLoadBalancers:  Services,
	corev1.ResourcePersistentVolumeClaims: Claims,
	corev1.ResourceRequestsStorage:        Claims,
	corev1.ResourceConfigMaps:             {Resource: "configmaps"},
	corev1.ResourceQuotas:                 {Resource: "resourcequotas"},
	corev1.ResourceReplicationControllers: {Resource: "replicationcontrollers"},
	corev1.ResourceSecrets:                {Resource: "secrets"},
}

// CountedResource returns the resource of the objects that are counted for a name in a quota. ok is
// false if no objects are counted for the name.
func CountedResource(name corev1.ResourceName) (gr schema.GroupResource, ok bool) {
	n := string(name)
	if kind, counted := strings.CutPrefix(n, countPrefix); counted {
		return schema.ParseGroupResource(kind), true
	}
	if gr, ok = shortNames[name]; ok {
		return gr, true
	}
	switch {
	case strings.HasSuffix(n, devicesSuffix):
		return Devices, true
	case strings.HasSuffix(n, classSuffix+string(corev1.ResourceRequestsStorage)),
		strings.HasSuffix(n, classSuffix+string(corev1.ResourcePersistentVolumeClaims)):
		return Claims, true
	case slices.Contains(computedNames, name), strings.HasPrefix(n, corev1.ResourceHugePagesPrefix),
		strings.HasPrefix(n, corev1.ResourceRequestsHugePagesPrefix),
		strings.HasPrefix(n, requestPrefix) && !isNative(n):
		return Pods, true
	}
	return schema.GroupResource{}, false
}

// LimitsResource reports whether a quota limits a name for which objects of the resource are
// counted.
func LimitsResource(spec *corev1.ResourceQuotaSpec, gr schema.GroupResource) bool {
	for name := range spec.Hard {
		if m, ok := CountedResource(name); ok && m == gr {
			return true
		}
	}
	return false
}

// ChargedUsage returns how much of a quota an object uses, only for the names in spec.hard. It
// returns nil if the object is nil or does not match the quota's scopes.
func ChargedUsage(
	s *corev1.ResourceQuotaSpec, gr schema.GroupResource, o api.Object, now time.Time,
) corev1.ResourceList {
	if o == nil || !LimitsResource(s, gr) || !isInScopes(s, gr, o) {
		return nil
	}
	all := ObjectUsage(gr, o, now)
	for name := range all {
		if _, bounded := s.Hard[name]; !bounded {
			delete(all, name)
		}
	}
	return all
}

// ObjectUsage returns the usage of an object for all names, independent of any quota. A pod only
// has an object count if, at currentTime, the pod is terminal or its deletion grace period has
// ended.
func ObjectUsage(gr schema.GroupResource, object api.Object, currentTime time.Time) corev1.ResourceList {
	u := corev1.ResourceList{corev1.ResourceName(countPrefix + gr.String()): newCount(1)}
	switch o := object.(type) {
	case *corev1.Pod:
		addPod(u, o, currentTime)
	case *corev1.PersistentVolumeClaim:
		addClaim(u, o)
	case *corev1.Service:
		addService(u, o)
	case *resourcev1.ResourceClaim:
		addDevices(u, o)
	default:
		if name := corev1.ResourceName(gr.Resource); shortNames[name] == gr {
			u[name] = newCount(1)
		}
	}
	return u
}

// TotalUsage returns how much of a quota all objects of its namespace use. objects lists the
// objects of a resource in that namespace. If it returns false, the resource does not exist, and
// the result does not contain its names.
func TotalUsage(
	s *corev1.ResourceQuotaSpec, now time.Time,
	objects func(of schema.GroupResource) (list []api.Object, ok bool, err error),
) (corev1.ResourceList, error) {
	kinds := map[schema.GroupResource][]corev1.ResourceName{}
	for name := range s.Hard {
		if of, ok := CountedResource(name); ok {
			kinds[of] = append(kinds[of], name)
		}
	}
	used := corev1.ResourceList{}
	for of, names := range kinds {
		list, ok, err := objects(of)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		for _, name := range names {
			used[name] = newCount(0)
		}
		for _, o := range list {
			Add(used, ChargedUsage(s, of, o, now))
		}
	}
	return used, nil
}

// IsStatusComplete reports whether the status of a quota is complete for its current spec:
// status.hard equals spec.hard, and every name has a usage. exists reports whether a resource
// exists; names of resources that do not exist are ignored.
func IsStatusComplete(quota *corev1.ResourceQuota, exists func(of schema.GroupResource) bool) bool {
	if !equality.Semantic.DeepEqual(quota.Spec.Hard, quota.Status.Hard) {
		return false
	}
	for name := range quota.Spec.Hard {
		of, ok := CountedResource(name)
		if _, told := quota.Status.Used[name]; ok && !told && exists(of) {
			return false
		}
	}
	return true
}

// Add adds quantities to total, which it modifies.
func Add(total, added corev1.ResourceList) {
	for name, q := range added {
		sum := total[name].DeepCopy()
		sum.Add(q)
		total[name] = sum
	}
}

// Subtract returns a minus b. The result does not contain names with a difference of zero.
func Subtract(a, b corev1.ResourceList) corev1.ResourceList {
	var out corev1.ResourceList
	set := func(name corev1.ResourceName, q resource.Quantity) {
		if q.IsZero() {
			return
		}
		if out == nil {
			out = corev1.ResourceList{}
		}
		out[name] = q
	}
	for name, q := range a {
		rest := q.DeepCopy()
		rest.Sub(b[name])
		set(name, rest)
	}
	for name, q := range b {
		if _, both := a[name]; !both {
			rest := q.DeepCopy()
			rest.Neg()
			set(name, rest)
		}
	}
	return out
}

// Format formats quantities as Kubernetes does in quota errors: "pods=1,requests.cpu=500m".
func Format(list corev1.ResourceList) string {
	names := make([]string, 0, len(list))
	for name := range list {
		names = append(names, string(name))
	}
	slices.Sort(names)
	for i, name := range names {
		q := list[corev1.ResourceName(name)]
		names[i] = name + "=" + q.String()
	}
	return strings.Join(names, ",")
}

func newCount(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }

// isNative reports whether a resource name is defined by Kubernetes: it has no domain or the domain
// kubernetes.io.
func isNative(name string) bool {
	return !strings.Contains(name, "/") || strings.Contains(name, corev1.ResourceDefaultNamespacePrefix)
}

// Package quota computes the usage of objects in the ResourceQuotas of their namespace, as
// Kubernetes does. It has pure functions of a quota and an object, which admission and the
// recounting controller share.
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

// Resources whose objects have usage beyond their count.
var (
	Pods     = schema.GroupResource{Resource: "pods"}
	Claims   = schema.GroupResource{Resource: "persistentvolumeclaims"}
	Services = schema.GroupResource{Resource: "services"}
	Devices  = schema.GroupResource{Group: resourcev1.GroupName, Resource: "resourceclaims"}
)

// Varies reports whether an update of an object can change its usage. Objects of other resources
// have a constant usage.
func Varies(of schema.GroupResource) bool { return of == Pods || of == Claims || of == Services }

const (
	countPrefix   = "count/"
	requestPrefix = corev1.DefaultResourceRequestsPrefix
	classSuffix   = ".storageclass.storage.k8s.io/"
	devicesSuffix = corev1.ResourceClaimsPerClass
)

// short maps the object count names that are older than count/RESOURCE.GROUP to their resources.
var short = map[corev1.ResourceName]schema.GroupResource{
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

// Measured returns the resource whose objects are counted for a name in a quota. ok is false for a
// name for which nothing is counted.
func Measured(name corev1.ResourceName) (of schema.GroupResource, ok bool) {
	n := string(name)
	if kind, counted := strings.CutPrefix(n, countPrefix); counted {
		return schema.ParseGroupResource(kind), true
	}
	if of, ok = short[name]; ok {
		return of, true
	}
	switch {
	case strings.HasSuffix(n, devicesSuffix):
		return Devices, true
	case strings.HasSuffix(n, classSuffix+string(corev1.ResourceRequestsStorage)),
		strings.HasSuffix(n, classSuffix+string(corev1.ResourcePersistentVolumeClaims)):
		return Claims, true
	case slices.Contains(computed, name), strings.HasPrefix(n, corev1.ResourceHugePagesPrefix),
		strings.HasPrefix(n, corev1.ResourceRequestsHugePagesPrefix), strings.HasPrefix(n, requestPrefix) && !native(n):
		return Pods, true
	}
	return schema.GroupResource{}, false
}

// Concerns reports whether a quota limits something for which objects of the resource are counted.
func Concerns(s *corev1.ResourceQuotaSpec, of schema.GroupResource) bool {
	for name := range s.Hard {
		if m, ok := Measured(name); ok && m == of {
			return true
		}
	}
	return false
}

// Charge returns the usage of an object in a quota, limited to the names in spec.hard. It is nil if
// the object is nil or not in the quota's scopes.
func Charge(s *corev1.ResourceQuotaSpec, of schema.GroupResource, o api.Object, now time.Time) corev1.ResourceList {
	if o == nil || !Concerns(s, of) || !inScopes(s, of, o) {
		return nil
	}
	all := Usage(of, o, now)
	for name := range all {
		if _, bounded := s.Hard[name]; !bounded {
			delete(all, name)
		}
	}
	return all
}

// Usage returns the complete usage of an object, independent of any quota. now decides whether a
// terminating pod still counts.
func Usage(of schema.GroupResource, o api.Object, now time.Time) corev1.ResourceList {
	u := corev1.ResourceList{corev1.ResourceName(countPrefix + of.String()): number(1)}
	switch o := o.(type) {
	case *corev1.Pod:
		addPod(u, o, now)
	case *corev1.PersistentVolumeClaim:
		addClaim(u, o)
	case *corev1.Service:
		addService(u, o)
	case *resourcev1.ResourceClaim:
		addDevices(u, o)
	default:
		if name := corev1.ResourceName(of.Resource); short[name] == of {
			u[name] = number(1)
		}
	}
	return u
}

// Count returns the total usage of all objects in a quota. objects lists the objects of a resource
// in the quota's namespace. If it returns false, the resource does not exist, and its names are
// omitted from the result.
func Count(
	s *corev1.ResourceQuotaSpec, now time.Time, objects func(of schema.GroupResource) (list []api.Object, ok bool, err error),
) (corev1.ResourceList, error) {
	kinds := map[schema.GroupResource][]corev1.ResourceName{}
	for name := range s.Hard {
		if of, ok := Measured(name); ok {
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
			used[name] = number(0)
		}
		for _, o := range list {
			Add(used, Charge(s, of, o, now))
		}
	}
	return used, nil
}

// Counted reports whether the status is complete for the current spec: status.hard equals
// spec.hard, and every name has a usage. known reports whether a resource exists; names of other
// resources are ignored.
func Counted(q *corev1.ResourceQuota, known func(of schema.GroupResource) bool) bool {
	if !equality.Semantic.DeepEqual(q.Spec.Hard, q.Status.Hard) {
		return false
	}
	for name := range q.Spec.Hard {
		of, ok := Measured(name)
		if _, told := q.Status.Used[name]; ok && !told && known(of) {
			return false
		}
	}
	return true
}

// Add adds b to a.
func Add(a, b corev1.ResourceList) {
	for name, q := range b {
		sum := a[name].DeepCopy()
		sum.Add(q)
		a[name] = sum
	}
}

// Minus returns a minus b without the names where the result is zero.
func Minus(a, b corev1.ResourceList) corev1.ResourceList {
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

func number(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }

// native reports whether a resource name is Kubernetes' own: without a domain or in kubernetes.io.
func native(name string) bool {
	return !strings.Contains(name, "/") || strings.Contains(name, corev1.ResourceDefaultNamespacePrefix)
}

// Package quota says what objects count for in the quotas of their namespaces, as Kubernetes counts them: pure functions
// of a quota and an object. Admission and the controller that counts anew share them.
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

// The resources whose objects count for more than their number.
var (
	Pods     = schema.GroupResource{Resource: "pods"}
	Claims   = schema.GroupResource{Resource: "persistentvolumeclaims"}
	Services = schema.GroupResource{Resource: "services"}
	Devices  = schema.GroupResource{Group: resourcev1.GroupName, Resource: "resourceclaims"}
)

// Varies says whether an update of an object can change what it counts for: of all others the number alone counts, or
// what never changes.
func Varies(of schema.GroupResource) bool { return of == Pods || of == Claims || of == Services }

const (
	countPrefix   = "count/"
	requestPrefix = corev1.DefaultResourceRequestsPrefix
	classSuffix   = ".storageclass.storage.k8s.io/"
	devicesSuffix = corev1.ResourceClaimsPerClass
)

// short are the names for numbers of objects that are older than count/RESOURCE.GROUP.
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

// Measured says by which objects a resource of a quota is measured; ok is false for a name that nothing is measured by.
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

// Concerns says whether a quota bounds something that such objects are measured by.
func Concerns(s *corev1.ResourceQuotaSpec, of schema.GroupResource) bool {
	for name := range s.Hard {
		if m, ok := Measured(name); ok && m == of {
			return true
		}
	}
	return false
}

// Charge is what an object counts for in a quota: nothing when it is nil, or not in the quota's scopes.
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

// Usage is what an object counts for, whatever is bounded.
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

// Count is what all objects of a quota's kinds count for together. objects lists those of a kind in the quota's
// namespace; ok is false for a kind that there is not, of which nothing is told.
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

// Counted says whether the status is about the present spec: every bound has been taken over, and what it is measured
// by has been counted. known says which kinds there are.
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

// Minus is a without b; what is equal is left out.
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

// Format shows quantities as Kubernetes does in refusals: "pods=1,requests.cpu=500m".
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

// native says whether a resource is one of Kubernetes' own.
func native(name string) bool {
	return !strings.Contains(name, "/") || strings.Contains(name, corev1.ResourceDefaultNamespacePrefix)
}

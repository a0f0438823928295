package discovery

import "strings"

// priorities are the priorities of the groups of Kubernetes, with the same values. Discovery lists
// groups by priority and then by name. The priority also decides which resource a client chooses
// for a short name that several groups use.
var priorities = map[string]int{
	"apiregistration.k8s.io":       20000,
	"":                             18000,
	"apps":                         17800,
	"events.k8s.io":                17750,
	"authentication.k8s.io":        17700,
	"authorization.k8s.io":         17600,
	"autoscaling":                  17500,
	"batch":                        17400,
	"certificates.k8s.io":          17300,
	"networking.k8s.io":            17200,
	"policy":                       17100,
	"rbac.authorization.k8s.io":    17000,
	"storage.k8s.io":               16800,
	"admissionregistration.k8s.io": 16700,
	"apiextensions.k8s.io":         16700,
	"scheduling.k8s.io":            16600,
	"coordination.k8s.io":          16500,
	"node.k8s.io":                  16300,
	"discovery.k8s.io":             16200,
	"flowcontrol.apiserver.k8s.io": 16100,
	"internal.apiserver.k8s.io":    16000,
	"resource.k8s.io":              15900,
	"storagemigration.k8s.io":      15800,
	"metrics.k8s.io":               100, // the priority in metrics-server's APIService
}

// customPriority is the priority of groups of custom resources, which come after the groups of
// Kubernetes.
const customPriority = 1000

func groupPriority(group string) int {
	if p, ok := priorities[group]; ok {
		return p
	}
	return customPriority
}

// compareGroups compares groups by descending priority, then by name.
func compareGroups(a, b string) int {
	if pa, pb := groupPriority(a), groupPriority(b); pa != pb {
		return pb - pa
	}
	return strings.Compare(a, b)
}

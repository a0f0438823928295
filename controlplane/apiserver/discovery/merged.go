package discovery

import (
	"maps"
	"net/http"
	"slices"
	"strings"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiversion "k8s.io/apimachinery/pkg/version"
)

// Remote is a group version that an aggregated API server serves.
type Remote struct {
	GV        schema.GroupVersion
	Resources []metav1.APIResource // from the last successful response; never changed
	Stale     bool                 // set if the API server does not respond
}

// Order is the priority of a group version in discovery. Larger numbers come first.
type Order struct{ Group, Version int32 }

// Priority returns the groupPriorityMinimum of a group.
func Priority(group string) int { return groupPriority(group) }

// BuiltIn reports whether a group is one of Kubernetes' own groups (see priorities).
func BuiltIn(group string) bool { _, ok := priorities[group]; return ok }

// ServeMerged is like Serve, but the documents include the group versions of aggregated API
// servers, which replace built-in group versions of the same name. orders are the priorities in
// APIServices. Groups without a priority have the same order as in Serve.
func (d *Documents) ServeMerged(
	w http.ResponseWriter, r *http.Request, remotes []Remote, orders map[schema.GroupVersion]Order,
) bool {
	path := strings.TrimSuffix(r.URL.Path, "/")
	if path != "/apis" && (!strings.HasPrefix(path, "/apis/") || strings.Count(path, "/") != 2) {
		return d.Serve(w, r)
	}
	return d.serveFrom(w, r, d.mergedDocumentsFor(remotes, orders))
}

// mergedDocuments are documents that include aggregated API servers, and the inputs from which they
// were generated.
type mergedDocuments struct {
	own       *documents
	remotes   []Remote
	orders    map[schema.GroupVersion]Order
	documents *documents
}

// mergedDocumentsFor returns the documents that include remotes. It generates them again only if an
// input has changed.
func (d *Documents) mergedDocumentsFor(remotes []Remote, orders map[schema.GroupVersion]Order) *documents {
	own := d.currentDocuments()
	d.merging.Lock()
	defer d.merging.Unlock()
	if is := d.merged; is == nil || is.own != own || !maps.Equal(is.orders, orders) ||
		!slices.EqualFunc(is.remotes, remotes, sameRemote) {
		d.merged = &mergedDocuments{own, remotes, orders, mergeDocuments(own, remotes, orders)}
	}
	return d.merged.documents
}

// sameRemote reports whether two remotes are equal. It compares the address of the resources,
// because a response is never modified.
func sameRemote(a, b Remote) bool {
	return a.GV == b.GV && a.Stale == b.Stale && len(a.Resources) == len(b.Resources) &&
		(len(a.Resources) == 0 || &a.Resources[0] == &b.Resources[0])
}

// mergeDocuments returns documents in which /apis and the paths of its groups include remotes. The
// others are those of base.
func mergeDocuments(base *documents, remotes []Remote, orders map[schema.GroupVersion]Order) *documents {
	all := combineGroups(base, remotes, orders)
	out := &documents{plain: make(map[string]runtime.Object, len(all)+1), aggregated: map[string]aggregated{}}
	list := &metav1.APIGroupList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroupList"},
		Groups: []metav1.APIGroup{}}
	for i := range all {
		one := metav1.APIGroup{Name: all[i].Name}
		for _, v := range all[i].Versions {
			gv := schema.GroupVersion{Group: one.Name, Version: v.Version}
			one.Versions = append(one.Versions, metav1.GroupVersionForDiscovery{GroupVersion: gv.String(),
				Version: v.Version})
		}
		one.PreferredVersion = one.Versions[0]
		list.Groups = append(list.Groups, one)
		one.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroup"}
		out.plain["/apis/"+one.Name] = &one
	}
	out.plain["/apis"] = list
	out.aggregated["/apis"] = withETag(&apidiscoveryv2.APIGroupDiscoveryList{Items: all})
	return out
}

// combineGroups returns the groups of this server and of the aggregated API servers in discovery
// order.
func combineGroups(
	base *documents, remotes []Remote, orders map[schema.GroupVersion]Order,
) []apidiscoveryv2.APIGroupDiscovery {
	versions := map[string][]apidiscoveryv2.APIVersionDiscovery{}
	taken := map[schema.GroupVersion]bool{}
	for _, rem := range remotes {
		taken[rem.GV] = true
		if rem.GV.Group == "" {
			continue // the core group is served below /api
		}
		v := apidiscoveryv2.APIVersionDiscovery{Version: rem.GV.Version,
			Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent, Resources: toDiscovery(rem)}
		if rem.Stale {
			v.Freshness = apidiscoveryv2.DiscoveryFreshnessStale
		}
		versions[rem.GV.Group] = append(versions[rem.GV.Group], v)
	}
	for _, g := range base.aggregated["/apis"].list.Items {
		for _, v := range g.Versions {
			if !taken[schema.GroupVersion{Group: g.Name, Version: v.Version}] {
				versions[g.Name] = append(versions[g.Name], v)
			}
		}
	}
	out := make([]apidiscoveryv2.APIGroupDiscovery, 0, len(versions))
	weights := make(map[string]int, len(versions))
	for name, all := range versions {
		weights[name] = groupWeight(name, all, orders)
		slices.SortFunc(all, func(a, b apidiscoveryv2.APIVersionDiscovery) int {
			pa := orders[schema.GroupVersion{Group: name, Version: a.Version}].Version
			pb := orders[schema.GroupVersion{Group: name, Version: b.Version}].Version
			if pa != pb {
				return int(pb) - int(pa)
			}
			return apiversion.CompareKubeAwareVersionStrings(b.Version, a.Version)
		})
		out = append(out, apidiscoveryv2.APIGroupDiscovery{ObjectMeta: metav1.ObjectMeta{Name: name}, Versions: all})
	}
	slices.SortFunc(out, func(a, b apidiscoveryv2.APIGroupDiscovery) int {
		if weights[a.Name] != weights[b.Name] {
			return weights[b.Name] - weights[a.Name]
		}
		return strings.Compare(a.Name, b.Name)
	})
	return out
}

// groupWeight returns the priority of a group in discovery: the largest group priority in the
// APIServices of its versions, or the default priority of the group.
func groupWeight(
	group string, versions []apidiscoveryv2.APIVersionDiscovery, orders map[schema.GroupVersion]Order,
) int {
	most := 0
	for _, v := range versions {
		most = max(most, int(orders[schema.GroupVersion{Group: group, Version: v.Version}].Group))
	}
	if most == 0 {
		return groupPriority(group)
	}
	return most
}

// toDiscovery converts the resources of a remote for the aggregated document, in which subresources
// are listed within their resource.
func toDiscovery(rem Remote) []apidiscoveryv2.APIResourceDiscovery {
	var out []apidiscoveryv2.APIResourceDiscovery
	at := map[string]int{}
	for _, r := range rem.Resources {
		if strings.Contains(r.Name, "/") {
			continue
		}
		scope := apidiscoveryv2.ScopeCluster
		if r.Namespaced {
			scope = apidiscoveryv2.ScopeNamespace
		}
		at[r.Name] = len(out)
		out = append(out, apidiscoveryv2.APIResourceDiscovery{
			Resource: r.Name, ResponseKind: responseKind(rem.GV, r), Scope: scope, SingularResource: r.SingularName,
			Verbs: r.Verbs, ShortNames: r.ShortNames, Categories: r.Categories,
		})
	}
	for _, r := range rem.Resources {
		name, sub, is := strings.Cut(r.Name, "/")
		i, known := at[name]
		if !is || !known {
			continue
		}
		out[i].Subresources = append(out[i].Subresources, apidiscoveryv2.APISubresourceDiscovery{
			Subresource: sub, ResponseKind: responseKind(rem.GV, r), Verbs: r.Verbs,
		})
	}
	return out
}

func responseKind(gv schema.GroupVersion, r metav1.APIResource) *metav1.GroupVersionKind {
	k := gv.WithKind(r.Kind)
	if r.Group != "" {
		k.Group = r.Group
	}
	if r.Version != "" {
		k.Version = r.Version
	}
	return groupVersionKind(k)
}

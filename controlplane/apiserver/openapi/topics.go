package openapi

import (
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
)

// topic is what one piece of a document describes: a kind, or a place, which is a path that is not
// a resource.
type topic struct {
	kind  *api.Kind
	place string // "version", "apis", "apis/apps", "apis/apps/v1"; "" for a kind
}

// uniqueName returns a unique name of the topic, by which topics are sorted.
func (t topic) uniqueName() string {
	if t.kind == nil {
		return t.place
	}
	return t.kind.GVK.String() + " " + t.kind.Resource
}

// documentRoot returns the path of the v3 document that contains the topic.
func (t topic) documentRoot() string {
	if t.kind == nil {
		return t.place
	}
	return documentRoot(t.kind)
}

var versionType = reflect.TypeFor[version.Info]()

const (
	versionPlace = "version"
	keysPlace    = "openid/v1/jwks"
	issuerPlace  = ".well-known/openid-configuration"
)

// topicsOf returns all topics of a table: its kinds, and the places. The groups and versions of
// custom resources are not places, because Kubernetes describes only their resources.
func topicsOf(t *api.Table) []topic {
	places := []string{"api", "apis", versionPlace, keysPlace, issuerPlace}
	out := make([]topic, 0, len(t.Visible())+64)
	for _, k := range t.Visible() {
		out = append(out, topic{kind: k})
		if k.Schema.Model != nil {
			continue
		}
		places = append(places, documentRoot(k))
		if k.GVK.Group != "" {
			places = append(places, "apis/"+k.GVK.Group)
		}
	}
	slices.Sort(places)
	for _, place := range slices.Compact(places) {
		out = append(out, topic{place: place})
	}
	return out
}

// describedBy returns the topics that a document describes. doc is its name, such as "v2" or
// "v3/apis/apps/v1".
func describedBy(t *api.Table, doc string) []topic {
	where, v3 := strings.CutPrefix(strings.TrimSuffix(doc, ".pb"), "v3/")
	out := topicsOf(t)
	if v3 {
		out = slices.DeleteFunc(out, func(x topic) bool { return x.documentRoot() != where })
	}
	return out
}

// addPlace adds the operation of a place, such as the request for the discovery document of a
// group.
func (d *document) addPlace(place string) {
	core := schema.GroupVersion{Version: "v1"}
	op := &operation{method: "get", consumes: objectMedia, produces: objectMedia, successes: answered}
	parts := strings.Split(place, "/")
	switch {
	case place == versionPlace:
		op.id, op.tag, op.description = "getCodeVersion", "version", "get the version of this server"
		op.consumes, op.produces, op.answer = textMedia[:1], textMedia[:1], d.typeRef(versionType)
	case place == keysPlace:
		op.id, op.tag, op.description = "getServiceAccountIssuerOpenIDKeyset", "openid",
			"get the keys of service account tokens"
		op.consumes, op.produces, op.answer = nil, []string{"application/jwk-set+json"}, object{"type": "string"}
	case place == issuerPlace:
		op.id, op.tag = "getServiceAccountIssuerOpenIDConfiguration", "WellKnown"
		op.description = "get the configuration of the service account issuer"
		op.consumes, op.produces, op.answer = nil, textMedia[:1], object{"type": "string"}
	case place == "api":
		op.id, op.tag, op.description = "getCoreAPIVersions", "core", "get available API versions"
		op.answer = d.rootTypeRef(&metav1.APIVersions{}, core.WithKind("APIVersions"))
	case place == "apis":
		op.id, op.tag, op.description = "getAPIVersions", "apis", "get available API groups"
		_ = d.rootTypeRef(&metav1.APIGroup{}, core.WithKind("APIGroup"))
		op.answer = d.rootTypeRef(&metav1.APIGroupList{}, core.WithKind("APIGroupList"))
	case len(parts) == 2 && parts[0] == "apis":
		gv := schema.GroupVersion{Group: parts[1]}
		op.id, op.tag = operationID("get", gv, "APIGroup"), camelCase(groupName(gv.Group), false)
		op.description = "get the versions of a group"
		op.answer = d.rootTypeRef(&metav1.APIGroup{}, core.WithKind("APIGroup"))
	default:
		gv := schema.GroupVersion{Version: parts[len(parts)-1]}
		if len(parts) == 3 {
			gv.Group = parts[1]
		}
		op.id, op.tag, op.description = operationID("get", gv, "APIResources"), versionTag(gv),
			"get available resources"
		op.answer = d.rootTypeRef(&metav1.APIResourceList{}, core.WithKind("APIResourceList"))
	}
	d.addPath("/"+place+"/", nil, op)
}

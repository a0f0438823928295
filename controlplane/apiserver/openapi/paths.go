package openapi

import (
	"maps"
	"slices"
	"sort"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// param is a query parameter.
type param struct{ name, kind, what string }

var (
	prettyParam = param{"pretty", "string", "If 'true', then the output is pretty printed."}
	writeParams = []param{
		prettyParam,
		{"dryRun", "string", "When present, indicates that modifications should not be persisted. The only valid value is 'All'."},
		{"fieldManager", "string", "The name associated with the actor or entity that is making these changes."},
		{"fieldValidation", "string", "What to do about unknown or duplicate fields: 'Ignore' drops them, 'Warn' drops them and says so in warnings, 'Strict' refuses the request."},
	}
	forceParam   = param{"force", "boolean", "Take over fields that other managers own. For apply patches only."}
	deleteParams = []param{
		prettyParam,
		{"dryRun", "string", "When present, indicates that modifications should not be persisted. The only valid value is 'All'."},
		{"gracePeriodSeconds", "integer", "The duration in seconds before the object should be deleted; 0 is at once."},
		{"orphanDependents", "boolean", "Deprecated: use propagationPolicy."},
		{"propagationPolicy", "string", "What happens to dependents: 'Orphan', 'Background' or 'Foreground'."},
	}
	listParams = []param{
		prettyParam,
		{"allowWatchBookmarks", "boolean", "Ask for events of type BOOKMARK, which tell how far the watch has come."},
		{"continue", "string", "Go on with a list at the place that the token of its last part names."},
		{"fieldSelector", "string", "Restrict the list by fields."},
		{"labelSelector", "string", "Restrict the list by labels."},
		{"limit", "integer", "The most objects to return at once."},
		{"resourceVersion", "string", "How fresh the answer must be."},
		{"resourceVersionMatch", "string", "How resourceVersion is meant."},
		{"sendInitialEvents", "boolean", "Begin a watch with the present state."},
		{"timeoutSeconds", "integer", "End the call after this time."},
		{"watch", "boolean", "Stream changes instead of listing."},
	}
)

// document is an OpenAPI document of some kinds.
type document struct {
	*schemas
	paths object
}

// add describes a kind.
func (d *document) add(k *api.Kind) {
	base := "/api/" + k.GVK.Version
	if k.GVK.Group != "" {
		base = "/apis/" + k.GVK.GroupVersion().String()
	}
	all, scoped := base+"/"+k.Resource, base+"/"+k.Resource
	if k.Namespaced {
		scoped = base + "/namespaces/{namespace}/" + k.Resource
	}
	body := d.top(k.New(), k.GVK)
	if k.Virtual {
		d.path(k, scoped, object{"post": d.operation(k, k.GVK, "create", "post", body, body, writeParams)})
		return
	}
	list := d.top(k.NewList(), k.ListGVK())
	status := d.status()
	if all != scoped {
		d.path(k, all, object{"get": d.operation(k, k.GVK, "listAllNamespaces", "list", nil, list, listParams)})
	}
	collection := object{
		"get":  d.operation(k, k.GVK, "list", "list", nil, list, listParams),
		"post": d.operation(k, k.GVK, "create", "post", body, body, writeParams),
	}
	if len(k.Verbs) == 0 || slices.Contains(k.Verbs, "deletecollection") {
		collection["delete"] = d.operation(k, k.GVK, "deletecollection", "deletecollection", d.deleteOptions(), status, slices.Concat(listParams, deleteParams[1:]))
	}
	d.path(k, scoped, collection)
	deleted := status
	if k.ReturnsDeleted {
		deleted = body
	}
	d.path(k, scoped+"/{name}", object{
		"get":    d.operation(k, k.GVK, "read", "get", nil, body, []param{prettyParam}),
		"put":    d.operation(k, k.GVK, "replace", "put", body, body, writeParams),
		"patch":  d.operation(k, k.GVK, "patch", "patch", d.patch(), body, slices.Concat(writeParams, []param{forceParam})),
		"delete": d.operation(k, k.GVK, "delete", "delete", d.deleteOptions(), deleted, deleteParams),
	})
	d.facets(k, scoped)
}

func (d *document) facets(k *api.Kind, scoped string) {
	names := make([]string, 0, len(k.Subresources))
	for n := range k.Subresources {
		names = append(names, n)
	}
	sort.Strings(names)
	for _, n := range names {
		sub := k.Subresources[n]
		gvk, body := k.GVK, d.top(k.New(), k.GVK)
		if sub.New != nil {
			gvk, body = sub.GVK, d.top(sub.New(), sub.GVK)
		}
		ops := object{}
		for _, v := range sub.Verbs {
			title := strings.ToUpper(n[:1]) + n[1:]
			switch v {
			case "get":
				ops["get"] = d.operation(k, gvk, "read"+title, "get", nil, body, []param{prettyParam})
			case "update":
				ops["put"] = d.operation(k, gvk, "replace"+title, "put", body, body, writeParams)
			case "patch":
				ops["patch"] = d.operation(k, gvk, "patch"+title, "patch", d.patch(), body, slices.Concat(writeParams, []param{forceParam}))
			case "create":
				ops["post"] = d.operation(k, gvk, "create"+title, "post", body, body, writeParams)
			}
		}
		if len(ops) > 0 {
			d.path(k, scoped+"/{name}/"+n, ops)
		}
	}
}

func (d *document) status() object {
	return d.top(&metav1.Status{}, schema.GroupVersionKind{Version: "v1", Kind: "Status"})
}

func (d *document) deleteOptions() object {
	return d.top(&metav1.DeleteOptions{}, schema.GroupVersionKind{Version: "v1", Kind: "DeleteOptions"})
}

func (d *document) patch() object {
	const name = "io.k8s.apimachinery.pkg.apis.meta.v1.Patch"
	d.defs[name] = object{
		"type":        "object",
		"description": "Patch is provided to give a concrete name and type to the Kubernetes PATCH request body.",
	}
	return object{"$ref": d.prefix() + name}
}

// path adds a path with the parameters that stand in it.
func (d *document) path(k *api.Kind, path string, ops object) {
	var params []object
	add := func(name, what string) {
		p := object{"in": "path", "name": name, "required": true, "description": what}
		d.typed(p, "string")
		params = append(params, p)
	}
	if strings.Contains(path, "{name}") {
		add("name", "name of the "+k.GVK.Kind)
	}
	if strings.Contains(path, "{namespace}") {
		add("namespace", "object name and auth scope, such as for teams and projects")
	}
	item := maps.Clone(ops)
	if len(params) > 0 {
		item["parameters"] = params
	}
	d.paths[path] = item
}

func (d *document) typed(p object, t string) {
	if d.v3 {
		p["schema"] = object{"type": t, "uniqueItems": true}
		return
	}
	p["type"], p["uniqueItems"] = t, true
}

var mediaTypes = []string{"application/json", "application/yaml", "application/vnd.kubernetes.protobuf"}

var patchMediaTypes = []string{
	"application/apply-patch+yaml", "application/json-patch+json", "application/merge-patch+json", "application/strategic-merge-patch+json",
}

func (d *document) operation(k *api.Kind, gvk schema.GroupVersionKind, id, action string, body, answer object, query []param) object {
	scope := ""
	if k.Namespaced {
		scope = "Namespaced"
	}
	group := "Core"
	if k.GVK.Group != "" {
		first, _, _ := strings.Cut(k.GVK.Group, ".")
		group = strings.ToUpper(first[:1]) + first[1:]
	}
	op := object{
		"operationId":         id + group + strings.ToUpper(k.GVK.Version[:1]) + k.GVK.Version[1:] + scope + k.GVK.Kind,
		"description":         id + " " + k.GVK.Kind,
		"tags":                []string{strings.ToLower(group) + "_" + k.GVK.Version},
		"x-kubernetes-action": action,
		"x-kubernetes-group-version-kind": object{
			"group": gvk.Group, "version": gvk.Version, "kind": gvk.Kind,
		},
	}
	var params []object
	for _, q := range query {
		p := object{"in": "query", "name": q.name, "description": q.what}
		d.typed(p, q.kind)
		params = append(params, p)
	}
	takes := mediaTypes
	if action == "patch" {
		takes = patchMediaTypes
	}
	code := "200"
	if action == "post" {
		code = "201"
	}
	if !d.v3 {
		if body != nil {
			params = append(params, object{"in": "body", "name": "body", "required": action != "delete" && action != "deletecollection", "schema": body})
		}
		op["consumes"], op["produces"], op["schemes"] = takes, mediaTypes, []string{"https"}
		op["responses"] = object{code: object{"description": "OK", "schema": answer}, "401": object{"description": "Unauthorized"}}
	} else {
		if body != nil {
			op["requestBody"] = object{"content": contents(takes, body)}
		}
		op["responses"] = object{code: object{"description": "OK", "content": contents(mediaTypes, answer)}, "401": object{"description": "Unauthorized"}}
	}
	if len(params) > 0 {
		op["parameters"] = params
	}
	return op
}

func contents(media []string, schema object) object {
	out := object{}
	for _, m := range media {
		out[m] = object{"schema": schema}
	}
	return out
}

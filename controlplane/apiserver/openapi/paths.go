package openapi

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"sort"
	"strings"
	"sync"

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

// document is what an OpenAPI document says of a kind.
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
	body := d.body(k)
	if k.Virtual {
		d.virtual(k, scoped, body)
		return
	}
	list := d.list(k)
	status := d.status()
	if all != scoped {
		d.path(k, all, object{"get": d.operation(k, k.GVK, "listAllNamespaces", "list", nil, list, listParams)})
	}
	collection := object{
		"get":  d.operation(k, k.GVK, "list", "list", nil, list, listParams),
		"post": d.operation(k, k.GVK, "create", "post", body, body, writeParams),
	}
	if len(k.Verbs) == 0 || slices.Contains(k.Verbs, "deletecollection") {
		collection["delete"] = d.operation(k, k.GVK, "deletecollection", "deletecollection", d.deleteOptions(), status,
			slices.Concat(listParams, deleteParams[1:]))
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

// virtual describes a kind that is answered: the verbs that it has.
func (d *document) virtual(k *api.Kind, scoped string, body object) {
	collection := object{}
	if slices.Contains(k.Verbs, "create") {
		collection["post"] = d.operation(k, k.GVK, "create", "post", body, body, writeParams)
	}
	if slices.Contains(k.Verbs, "list") {
		collection["get"] = d.operation(k, k.GVK, "list", "list", nil, d.list(k), listParams)
	}
	d.path(k, scoped, collection)
	if slices.Contains(k.Verbs, "get") {
		d.path(k, scoped+"/{name}", object{"get": d.operation(k, k.GVK, "read", "get", nil, body, []param{prettyParam})})
	}
}

// connections are the facets behind which somebody else answers.
var connections = []string{"attach", "exec", "portforward", "proxy"}

func (d *document) facets(k *api.Kind, scoped string) {
	names := make([]string, 0, len(k.Subresources))
	for n := range k.Subresources {
		names = append(names, n)
	}
	sort.Strings(names)
	for _, n := range names {
		sub := k.Subresources[n]
		action := func(of string) string {
			if slices.Contains(connections, n) {
				return "connect"
			}
			return of
		}
		gvk, body := k.GVK, d.body(k)
		if sub.New != nil {
			gvk, body = sub.GVK, d.top(sub.New(), sub.GVK)
		}
		ops := object{}
		for _, v := range sub.Verbs {
			title := strings.ToUpper(n[:1]) + n[1:]
			switch v {
			case "get":
				ops["get"] = d.operation(k, gvk, "read"+title, action("get"), nil, body, []param{prettyParam})
			case "update":
				ops["put"] = d.operation(k, gvk, "replace"+title, action("put"), body, body, writeParams)
			case "patch":
				ops["patch"] = d.operation(k, gvk, "patch"+title, action("patch"), d.patch(), body, slices.Concat(writeParams, []param{forceParam}))
			case "create":
				ops["post"] = d.operation(k, gvk, "create"+title, action("post"), body, body, writeParams)
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

func (d *document) patch() object { return d.ref(reflect.TypeFor[metav1.Patch]()) }

// path adds a path with the parameters that stand in it.
func (d *document) path(k *api.Kind, path string, ops object) {
	var params []object
	add := func(name, what string) {
		p := object{"in": "path", "name": name, "required": true, "description": what}
		typed(p, "string", d.v3)
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

// queries are the query parameters as they are written, in v2 and in v3: they are most of the text of every path.
var queries = sync.OnceValue(func() (out [2]map[param]json.RawMessage) {
	for i := range out {
		out[i] = map[param]json.RawMessage{}
		for _, q := range slices.Concat(writeParams, []param{forceParam}, deleteParams, listParams) {
			p := object{"in": "query", "name": q.name, "description": q.what}
			typed(p, q.kind, i == 1)
			data, err := json.Marshal(p)
			if err != nil {
				panic(err) // of texts
			}
			out[i][q] = data
		}
	}
	return out
})

func written(q param, v3 bool) json.RawMessage {
	if v3 {
		return queries()[1][q]
	}
	return queries()[0][q]
}

func typed(p object, t string, v3 bool) {
	if v3 {
		p["schema"] = object{"type": t, "uniqueItems": true}
		return
	}
	p["type"], p["uniqueItems"] = t, true
}

var mediaTypes = []string{"application/json", "application/yaml", "application/vnd.kubernetes.protobuf"}

func patchMediaTypes(k *api.Kind) (out []string) {
	for _, t := range k.Patches() {
		out = append(out, string(t))
	}
	return out
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
	var params []any
	for _, q := range query {
		params = append(params, written(q, d.v3))
	}
	takes := mediaTypes
	if action == "patch" {
		takes = patchMediaTypes(k)
	}
	answers := object{"401": object{"description": "Unauthorized"}}
	for code, what := range successes[action] {
		answers[code] = d.answer(what, answer)
	}
	op["responses"] = answers
	if !d.v3 {
		if body != nil {
			params = append(params, object{"in": "body", "name": "body", "required": action != "delete" && action != "deletecollection", "schema": body})
		}
		op["consumes"], op["produces"], op["schemes"] = takes, mediaTypes, []string{"https"}
	} else if body != nil {
		op["requestBody"] = object{"content": contents(takes, body)}
	}
	if len(params) > 0 {
		op["parameters"] = params
	}
	return op
}

// answered is how reads are answered.
var answered = map[string]string{"200": "OK"}

// successes are the codes with which an action may be answered, as Kubernetes lists them: updates and applied
// configurations may create.
var successes = map[string]map[string]string{
	"get": answered, "list": answered, "deletecollection": answered, "connect": answered,
	"post":   {"200": "OK", "201": "Created", "202": "Accepted"},
	"put":    {"200": "OK", "201": "Created"},
	"patch":  {"200": "OK", "201": "Created"},
	"delete": {"200": "OK", "202": "Accepted"},
}

func (d *document) answer(what string, schema object) object {
	if d.v3 {
		return object{"description": what, "content": contents(mediaTypes, schema)}
	}
	return object{"description": what, "schema": schema}
}

func contents(media []string, schema object) object {
	out := object{}
	for _, m := range media {
		out[m] = object{"schema": schema}
	}
	return out
}

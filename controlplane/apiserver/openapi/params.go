package openapi

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
)

// param is a parameter of an operation: its location, name, type and description. Two params with
// equal values are the same parameter.
type param struct{ location, name, kind, description string }

func queryParam(name, kind, description string) param { return param{"query", name, kind, description} }

var (
	prettyParam          = queryParam("pretty", "string", "If 'true', then the output is pretty printed.")
	dryRunParam          = queryParam("dryRun", "string", "'All' processes the request and stores nothing.")
	resourceVersionParam = queryParam("resourceVersion", "string", "How fresh the answer must be.")
	namespaceParam       = param{"path", "namespace", "string", "the namespace of the objects"}
	pathParam            = param{"path", "path", "string", "path to the resource"}

	writeParams = []param{
		prettyParam,
		dryRunParam,
		queryParam("fieldManager", "string",
			"The name associated with the actor or entity that is making these changes."),
		queryParam("fieldValidation", "string",
			"What happens to unknown and duplicate fields: 'Ignore', 'Warn' or 'Strict'."),
	}
	patchParams = append(slices.Clone(writeParams),
		queryParam("force", "boolean", "Take over fields that other managers own. For apply patches only."))
	deleteParams = []param{
		prettyParam,
		dryRunParam,
		queryParam("gracePeriodSeconds", "integer",
			"The duration in seconds before the object should be deleted; 0 is at once."),
		queryParam("ignoreStoreReadErrorWithClusterBreakingPotential", "boolean", "Delete an unreadable object."),
		queryParam("orphanDependents", "boolean", "Deprecated: use propagationPolicy."),
		queryParam("propagationPolicy", "string",
			"What happens to dependents: 'Orphan', 'Background' or 'Foreground'."),
	}
	watchParams = []param{
		queryParam("allowWatchBookmarks", "boolean",
			"Ask for events of type BOOKMARK, which report the progress of the watch."),
		queryParam("watch", "boolean", "Stream changes instead of listing."),
	}
	selectParams = []param{
		prettyParam,
		queryParam("continue", "string", "Continue a list at the token of its previous part."),
		queryParam("fieldSelector", "string", "Restrict the list by fields."),
		queryParam("labelSelector", "string", "Restrict the list by labels."),
		queryParam("limit", "integer", "The most objects to return at once."),
		resourceVersionParam,
		queryParam("resourceVersionMatch", "string", "How resourceVersion is meant."),
		queryParam("sendInitialEvents", "boolean", "Begin a watch with the present state."),
		queryParam("shardSelector", "string", "Restrict the list to a shard. This server ignores the parameter."),
		queryParam("timeoutSeconds", "integer", "End the call after this time."),
	}
	listParams = slices.Concat(selectParams, watchParams)
	// deleteCollectionParams are the parameters of deletecollection: those of a list without watch,
	// and those of a delete.
	deleteCollectionParams = slices.Concat(selectParams, deleteParams[1:])
)

// options are the option types of connect requests and logs, by kind. Their fields are query
// parameters.
var options = map[string]any{
	"PodLogOptions": corev1.PodLogOptions{}, "PodExecOptions": corev1.PodExecOptions{},
	"PodAttachOptions":      corev1.PodAttachOptions{},
	"PodPortForwardOptions": corev1.PodPortForwardOptions{}, "PodProxyOptions": corev1.PodProxyOptions{},
	"ServiceProxyOptions": corev1.ServiceProxyOptions{}, "NodeProxyOptions": corev1.NodeProxyOptions{},
}

// optionParams returns the query parameters of each option type by its kind. Fields that are
// structs are omitted.
var optionParams = sync.OnceValue(func() map[string][]param {
	out := map[string][]param{}
	for kind, of := range options {
		t, docs := reflect.TypeOf(of), of.(documented).SwaggerDoc()
		for i := range t.NumField() {
			name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
			if typ := parameterType(t.Field(i).Type); name != "" && typ != "" {
				out[kind] = append(out[kind], queryParam(name, typ, docs[name]))
			}
		}
	}
	return out
})

// parameterType returns the type of the query parameter for a field, "" for a struct. A list is a
// repeated parameter of its element type.
func parameterType(t reflect.Type) string {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	switch t.Kind() {
	case reflect.Bool:
		return "boolean"
	case reflect.String:
		return "string"
	case reflect.Int, reflect.Int32, reflect.Int64:
		return "integer"
	}
	return ""
}

// shared returns the parameters that many operations have. A v2 document declares them once, and
// its operations reference them.
var shared = sync.OnceValue(func() []param {
	out := slices.Concat(listParams, patchParams, deleteParams, []param{namespaceParam, pathParam})
	slices.SortFunc(out, func(a, b param) int { return strings.Compare(a.parameterRef(), b.parameterRef()) })
	return slices.Compact(out)
})

// stated lists the shared parameters that operations declare instead of referencing them, because
// old versions of kubectl require this.
var stated = []string{"dryRun", "fieldValidation"}

func (p param) parameterRef() string { return p.location + "-" + p.name }

// sharedParameters returns the parameters section of v2 documents.
var sharedParameters = sync.OnceValue(func() map[string]json.RawMessage {
	out := map[string]json.RawMessage{}
	for _, p := range shared() {
		if !slices.Contains(stated, p.name) {
			out[p.parameterRef()] = p.encodeParam(false)
		}
	}
	return out
})

// encodedParams returns the JSON of each shared parameter as it appears in an operation or path;
// index 0 is for v2, index 1 for v3.
var encodedParams = sync.OnceValue(func() (out [2]map[param]json.RawMessage) {
	out = [2]map[param]json.RawMessage{{}, {}}
	for _, p := range shared() {
		out[1][p] = p.encodeParam(true)
		out[0][p] = p.encodeParam(false)
		if !slices.Contains(stated, p.name) {
			out[0][p] = json.RawMessage(`{"$ref":"#/parameters/` + p.parameterRef() + `"}`)
		}
	}
	return out
})

// writeParam returns the JSON of the parameter as it appears in an operation or path. For a shared
// parameter in v2, it is a reference.
func (p param) writeParam(v3 bool) json.RawMessage {
	version := 0
	if v3 {
		version = 1
	}
	if data := encodedParams()[version][p]; data != nil {
		return data
	}
	return p.encodeParam(v3)
}

func (p param) encodeParam(v3 bool) json.RawMessage {
	out := object{"in": p.location, "name": p.name}
	if p.description != "" {
		out["description"] = p.description
	}
	if p.location == "path" {
		out["required"] = true
	}
	if v3 {
		out["schema"] = object{"type": p.kind, "uniqueItems": true}
	} else {
		out["type"], out["uniqueItems"] = p.kind, true
	}
	data, err := json.Marshal(out)
	if err != nil {
		panic(err) // strings always encode
	}
	return data
}

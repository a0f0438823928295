package apiserver_test

import (
	"fmt"
	"net/url"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

var fuzzedPatches = []string{"application/json-patch+json", "application/merge-patch+json",
	"application/strategic-merge-patch+json",
	"application/apply-patch+yaml", "application/apply-patch+cbor"}

// Whatever a patch says, of each type, to a pod and to a custom object, it is answered and no fault
// of the server.
func FuzzPatches(f *testing.F) {
	r := apiservertest.StartReplica(f, nil)
	c := r.AdminHTTP()
	if err := r.Kinds.Register(apiservertest.GadgetKind()); err != nil {
		f.Fatal(err)
	}
	r.Must(apiservertest.NewPod("p"))
	r.OK(r.Call(c, "POST", apiservertest.GadgetsPath,
		`{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"p"},"spec":{"l":[{"a":1}],"m":{"k":"v"}}}`,
		"Content-Type", "application/json"))
	targets := []string{"/api/v1/namespaces/default/pods/p", "/api/v1/namespaces/default/pods/p/status",
		apiservertest.GadgetsPath + "/p", apiservertest.GadgetsPath + "/p/status"}
	for media, bodies := range map[uint8][]string{
		0: {`[{"op":"add","path":"/metadata/labels","value":{"a":"b"}},{"op":"test","path":"/spec/l/0/a","value":1}]`,
			`[{"op":"move","from":"/spec","path":"/spec/l/-"},{"op":"copy","from":"","path":"/spec/m"}]`,
			`[{"op":"remove","path":"/~1~01"}]`},
		1: {`{"metadata":{"labels":{"a":null}},"spec":{"l":null}}`, `{"spec":null}`, `[]`},
		2: {`{"spec":{"containers":[{"name":"c","image":"x","$patch":"replace"}],` +
			`"$setElementOrder/containers":[{"name":"c"}]}}`,
			`{"metadata":{"$deleteFromPrimitiveList/finalizers":["a"]},"$retainKeys":[]}`,
			`{"spec":{"$patch":"delete"}}`},
		3: {"apiVersion: v1\nkind: Pod\nmetadata: {name: p, labels: {a: b}}\n",
			"apiVersion: example.com/v1\nkind: Gadget\nspec: {l: [{a: 2}]}\n", "a: &a [*a]"},
		4: {"\xd9\xd9\xf7\xa2JapiVersionBv1DkindCPod", "\xa1"},
	} {
		for _, body := range bodies {
			for target := range targets {
				f.Add(media, uint8(target), []byte(body))
			}
		}
	}
	f.Fuzz(func(t *testing.T, media, target uint8, body []byte) {
		query := "?dryRun=All"
		if media %= uint8(len(fuzzedPatches)); media >= 3 {
			query += "&force=true&fieldManager=m"
		}
		r.Answered(t, c, "PATCH", targets[target%4]+query, string(body), "Content-Type", fuzzedPatches[media])
	})
}

// Whatever a reader asks for by path, selectors, revisions, tokens and media types, it is answered
// and no fault of the server. Watches are asked to last a second at most by what is found in the
// query; a client leaves after the head.
func FuzzReads(f *testing.F) {
	r := apiservertest.StartReplica(f, nil)
	c := r.AdminHTTP()
	r.Must(apiservertest.NewPod("p"))
	add := func(path, labels, fields, rv, match, token, accept string) {
		f.Add(path, labels, fields, rv, match, token, accept, false)
	}
	const table = "application/json;as=Table;v=v1;g=meta.k8s.io"
	add("/api/v1/pods", "a in (b),!c", "spec.nodeName=", "0", "NotOlderThan", "", table)
	add("/api/v1/namespaces/default/pods/p", "", "", "1", "Exact", "", "application/cbor")
	add("/apis/apps/v1/deployments", "a=b", "metadata.name=x", "18446744073709551616", "", "e30",
		"application/vnd.kubernetes.protobuf,*/*;q=0.1")
	add("/api/v1/watch/namespaces/default/pods/p", "", "", "-1", "", "", "application/yaml")
	add("/openapi/v3/api/v1", "", "", "", "", "", "application/com.github.proto-openapi.spec.v3@v1.0+protobuf")
	add("/api/v1/namespaces/../pods//p/%2e%2e", "((", "a\\", "x", "None", "\x00", ";;q=")
	f.Add("/api/v1/pods", "a", "", "0", "NotOlderThan", "", "application/cbor", true)
	f.Fuzz(func(t *testing.T, path, labels, fields, rv, match, token, accept string, watch bool) {
		if !strings.HasPrefix(path, "/") || strings.ContainsAny(path, "?#") || strings.Contains(path, "pprof") ||
			strings.Contains(path, "log") || strings.Contains(path, "proxy") || strings.Contains(path, "cluster") ||
			strings.Contains(path, "keelson") {
			return // what lasts, or asks a node that is none
		}
		if labels == "" && watch {
			labels = "a"
		}
		q := url.Values{"labelSelector": {labels}, "fieldSelector": {fields}, "resourceVersion": {rv},
			"resourceVersionMatch": {match},
			"continue":             {token}, "limit": {"2"}, "timeoutSeconds": {"1"}, "watch": {fmt.Sprint(watch)}}
		r.Answered(t, c, "GET", path+"?"+q.Encode(), "", "Accept", accept)
	})
}

// Whatever a body says and claims to be, it is made into an object or refused.
func FuzzCreates(f *testing.F) {
	r := apiservertest.StartReplica(f, nil)
	c := r.AdminHTTP()
	f.Add("application/json",
		[]byte(`{"metadata":{"generateName":"a"},"spec":{"containers":[{"name":"c","image":"i"}]}}`))
	f.Add("application/yaml; charset=utf-8", []byte("metadata: {name: x}\nspec: {containers: [{name: c, image: i}]}"))
	f.Add("application/vnd.kubernetes.protobuf", []byte("k8s\x00\n\t\n\x02v1\x12\x03Pod\x12\x00"))
	f.Add("application/cbor", []byte("\xa1Hmetadata\xa1DnameAx"))
	f.Add("text/plain;", []byte("x"))
	f.Fuzz(func(t *testing.T, media string, body []byte) {
		r.Answered(t, c, "POST", "/api/v1/namespaces/default/pods?dryRun=All", string(body), "Content-Type", media)
	})
}

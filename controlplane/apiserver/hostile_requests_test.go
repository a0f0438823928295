package apiserver_test

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// hostileRequest is a request that only a hostile client sends.
type hostileRequest struct {
	name, method, path, body string
	headers                  []string
}

const oneMap = "/api/v1/namespaces/default/configmaps"

// hostileBodies returns bodies of all media types: deeply nested, with many values, decompression
// bombs or truncated.
func hostileBodies(t *testing.T) (out []hostileRequest) {
	const jsonType, yamlType, protoType = "application/json", "application/yaml", "application/vnd.kubernetes.protobuf"
	add := func(name, media, body string, headers ...string) {
		headers = append([]string{"Content-Type", media}, headers...)
		out = append(out,
			hostileRequest{"create with " + name, "POST", oneMap, body, headers},
			hostileRequest{"delete with " + name, "DELETE", oneMap + "/none", body, headers})
	}
	deep := strings.Repeat(`{"a":`, 100000)
	add("deep JSON", jsonType, deep)
	add("deep closed JSON", jsonType, deep+"1"+strings.Repeat("}", 100000))
	add("deep lists", jsonType, `{"kind":"ConfigMap","apiVersion":"v1","data":`+strings.Repeat("[", 500000))
	add("deep YAML", yamlType, strings.Repeat("- ", 50000)+"x")
	add("deep flow YAML", yamlType, strings.Repeat("[", 100000))
	add("deep mappings of YAML", yamlType, strings.Repeat("{a: ", 100000))
	add("tags of YAML", yamlType, "!!binary "+strings.Repeat("!!str ", 10000)+"x")
	add("many documents", yamlType, strings.Repeat("---\na: 1\n", 100000))
	add("merge keys", yamlType, "a: &a {b: 1}\n"+strings.Repeat("c:\n  <<: *a\n", 20000))
	add("a long number", jsonType, `{"metadata":{"generation":1`+strings.Repeat("0", 1<<20)+`}}`)
	add("a large exponent", jsonType, `{"metadata":{"generation":1e999999999}}`)
	add("torn text", jsonType, `{"metadata":{"name":"\ud800`)
	add("bytes that are no text", jsonType, "\xff\xfe\x00"+strings.Repeat("\x00", 1<<20))
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	_, _ = z.Write(make([]byte, 64<<20))
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	add("a gzip bomb", jsonType, bomb.String(), "Content-Encoding", "gzip")
	add("an envelope of nothing", protoType, "k8s\x00")
	inner := []byte("x")
	for range 5000 {
		inner = protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), inner)
	}
	envelope := protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), inner)
	add("deep protobuf", protoType, "k8s\x00"+string(envelope))
	add("groups of protobuf", protoType, "k8s\x00"+strings.Repeat("\x0b", 1<<20))
	add("a length beyond the end", protoType, "k8s\x00\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f")
	var managed []string
	for i := range 10000 {
		managed = append(managed,
			fmt.Sprintf(`{"manager":"m%d","operation":"Update","apiVersion":"v1","fieldsType":"FieldsV1",`+
				`"fieldsV1":{"f:data":{}}}`, i))
	}
	add("10,000 managed fields", jsonType, `{"metadata":{"name":"x","managedFields":[`+strings.Join(managed, ",")+`]}}`)
	fields := strings.Repeat(`{"f:a":`, 900) + "{}" + strings.Repeat("}", 900)
	add("deep managed fields", jsonType,
		`{"metadata":{"name":"x","managedFields":[{"manager":"m","operation":"Apply","apiVersion":"v1",`+
			`"fieldsType":"FieldsV1","fieldsV1":`+fields+`}]}}`)
	var finalizers []string
	for i := range 16000 {
		finalizers = append(finalizers, fmt.Sprintf(`"a.b/c%d"`, i))
	}
	add("16,000 finalizers", jsonType, `{"metadata":{"name":"x","finalizers":[`+strings.Join(finalizers, ",")+`]}}`)
	return out
}

func hostilePatches() (out []hostileRequest) {
	deep := strings.Repeat(`{"data":`, 50000) + "1" + strings.Repeat("}", 50000)
	for _, media := range []string{"application/merge-patch+json", "application/strategic-merge-patch+json",
		"application/json-patch+json", "application/apply-patch+yaml"} {
		for name, body := range map[string]string{
			"deep": deep, "empty": "", "null": "null", "a list": "[[[]]]", "a number": "7", "torn": `{"a`,
			"another object": `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"victim"}}`,
			"directives": `{"data":{"$patch":"replace"},"$setElementOrder/x":[1],"$retainKeys":["a",{}],` +
				`"metadata":{"$deleteFromPrimitiveList/finalizers":[{}]}}`,
			"wrong types": `{"metadata":{"labels":[1],"ownerReferences":{"a":1},"managedFields":"x","name":7}}`,
			"pointers": `[{"op":"add","path":"` + strings.Repeat("/a", 100000) +
				`","value":1},{"op":"test","path":"/~2"}]`,
		} {
			out = append(out, hostileRequest{media + " that is " + name, "PATCH", oneMap + "/victim?fieldManager=m",
				body, []string{"Content-Type", media}})
		}
		out = append(out, hostileRequest{media + " of a huge manager", "PATCH",
			oneMap + "/victim?force=true&fieldManager=" + strings.Repeat("m", 20000),
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"victim"}}`, []string{"Content-Type", media}})
	}
	return out
}

func hostileReads() (out []hostileRequest) {
	get := func(name, query string, headers ...string) {
		out = append(out, hostileRequest{name, "GET", oneMap + "?" + query, "", headers})
	}
	q := url.QueryEscape
	get("a selector of many terms", "labelSelector="+q(strings.Repeat("a,", 10000)+"a"))
	get("a watch with many terms", "watch=1&labelSelector="+q(strings.Repeat("!a,", 5000)+"a"))
	get("fields of many terms", "fieldSelector="+q(strings.Repeat("metadata.name!=a,", 1500)+"metadata.name!=b"))
	for _, sel := range []string{"(((((", "a in (", "a in (,,,,)", "=", "!!", "a>99999999999999999999", "\x00",
		"a notin ()", "метка=1", `a\,b=1`} {
		get("labels "+sel, "labelSelector="+q(sel))
		get("fields "+sel, "fieldSelector="+q(sel))
	}
	tokens := []string{"x", "e30", "bnVsbA",
		base64.RawURLEncoding.EncodeToString([]byte(
			`{"v":"meta.k8s.io/v1","rv":-9223372036854775808,"start":"../../x"}`)),
		base64.RawURLEncoding.EncodeToString([]byte(`{"v":"meta.k8s.io/v1","rv":1,"start":"` +
			strings.Repeat("z", 5000) + `"}`)),
		base64.RawURLEncoding.EncodeToString([]byte(
			`{"v":"meta.k8s.io/v1","rv":9223372036854775807,"start":"kube-system/a\u0000"}`))}
	for _, token := range tokens {
		get("continue "+token[:min(len(token), 20)], "continue="+q(token))
		get("limited continue", "limit=1&continue="+q(token))
		out = append(out, hostileRequest{"collection with a token", "DELETE",
			oneMap + "?limit=1&dryRun=All&continue=" + q(token), "", nil})
	}
	for _, rv := range []string{"-1", "18446744073709551615", "18446744073709551616", "9223372036854775808", "1e3",
		"0x10", " 1", "٣"} {
		get("revision "+rv, "resourceVersion="+q(rv))
		get("watch from "+rv, "watch=1&timeoutSeconds=1&resourceVersion="+q(rv))
		get("exactly "+rv, "resourceVersionMatch=Exact&resourceVersion="+q(rv))
		get("initial events from "+rv,
			"watch=1&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&resourceVersion="+q(rv))
	}
	for _, n := range []string{"-1", "9223372036854775807", "-9223372036854775808", "99999999999999999999", "x"} {
		get("limit "+n, "limit="+n)
		get("timeout "+n, "watch=1&resourceVersion=1x&timeoutSeconds="+n)
		out = append(out, hostileRequest{"collection of limit " + n, "DELETE",
			oneMap + "?dryRun=All&limit=" + n, "", nil})
	}
	for _, accept := range []string{"application/json;as=Table;v=v1;g=meta.k8s.io",
		"application/vnd.kubernetes.protobuf;as=Table;v=v1;g=meta.k8s.io",
		"application/yaml;as=PartialObjectMetadata;v=v1;g=meta.k8s.io", "application/json;as=Nonsense;v=v9;g=x",
		strings.Repeat("a/b,", 10000), ";;;;", "*/*;q=NaN"} {
		get("accept "+accept[:min(len(accept), 50)], "includeObject=Object&limit=5", "Accept", accept)
		get("watch accept "+accept[:min(len(accept), 50)], "watch=1&timeoutSeconds=1&includeObject=Object",
			"Accept", accept)
		get("accept none "+accept[:min(len(accept), 50)], "includeObject=Nonsense", "Accept", accept)
	}
	var many []string
	for i := range 1200 {
		many = append(many, fmt.Sprintf("X-%d", i), "y")
	}
	get("1,200 headers", "", many...)
	get("many parameters", strings.Repeat("a=b&", 8000))
	get("torn escapes", "labelSelector=%zz&continue=%")
	for _, path := range []string{"/api/v1/namespaces/default/configmaps/..%2f..%2fsecrets",
		"/api/v1/namespaces/%00/configmaps", "/api/v1/watch/namespaces/default/configmaps/x/y",
		"/api/v1/namespaces/default/pods/x/proxy/a/b", "/apis/a/b/c/d/e/f/g",
		"/api/v1/namespaces/default/configmaps/" + strings.Repeat("n", 3000), "/openapi/v3/../../x",
		"/api/%76%31/nodes"} {
		for _, method := range []string{"GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "PROPFIND", "HEAD"} {
			out = append(out, hostileRequest{method + " " + path[:min(len(path), 60)], method, path, "{}",
				[]string{"Content-Type", "application/json"}})
		}
	}
	return out
}

// Nothing that a client sends makes a replica fail: each of these is answered, with no error of the
// server's, in a moment, and within some memory.
func TestHostileRequests(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	client := r.AdminHTTP()
	room := uint64(64 << 20)
	if apiservertest.Instrumented {
		room *= 8
	}
	if got := r.Call(client, "POST", oneMap,
		`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"victim"},"data":{"a":"b"}}`, "Content-Type",
		"application/json"); got.Code != http.StatusCreated {
		t.Fatalf("%d %s", got.Code, got.Body)
	}
	codes := map[int]int{}
	for _, h := range append(append(hostileBodies(t), hostilePatches()...), hostileReads()...) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		began := time.Now()
		got := r.Call(client, h.method, h.path, h.body, h.headers...)
		took := time.Since(began)
		runtime.ReadMemStats(&after)
		codes[got.Code]++
		if got.Code >= 500 &&
			!(got.Code == http.StatusGatewayTimeout && strings.Contains(got.Body, "Too large resource version")) {
			t.Errorf("%s: %d %.300s", h.name, got.Code, got.Body)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > room+32*uint64(len(h.body)) {
			// values are bounded by the size of a text
			t.Errorf("%s: %d MiB were allocated", h.name, grown>>20)
		}
		if took > 20*time.Second {
			t.Errorf("%s took %v", h.name, took)
		}
		if strings.HasPrefix(got.Body, "{") && !strings.Contains(h.path, "watch") && !json.Valid([]byte(got.Body)) {
			t.Errorf("%s: half an answer: %.200s", h.name, got.Body)
		}
	}
	t.Logf("answers by code: %v", codes)
}

package endpoints_test

import (
	"bytes"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	appsapply "k8s.io/client-go/applyconfigurations/apps/v1"
	coreapply "k8s.io/client-go/applyconfigurations/core/v1"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	clientfeatures "k8s.io/client-go/features"
	clientfeaturestesting "k8s.io/client-go/features/testing"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// JSON, YAML and CBOR responses have the same content: objects, lists and tables, small ones and
// those written item by item, of kinds with and without a Go type.
func TestMediaTypesAreEquivalent(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	if err := r.Kinds.Register(apiservertest.GadgetKind()); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		r.Must(apiservertest.NewPod(fmt.Sprint("p", i)))
		r.Must(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("s", i)},
			Data: map[string][]byte{"binary": {0, 0xff, 0xd9}, "large": bytes.Repeat([]byte("x"), 64<<10)}})
		gadget := fmt.Sprintf(`{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"g%d"},`+
			`"spec":{"a":1.0,"b":[true,null,-7,2.5],"c":"é"}}`, i)
		if a := r.Call(c, "POST", apiservertest.GadgetsPath, gadget, "Content-Type", "application/json"); a.Code !=
			http.StatusCreated {
			t.Fatalf("%d %s", a.Code, a.Body)
		}
	}
	const base = "/api/v1/namespaces/default/"
	for _, path := range []string{
		base + "pods/p1", base + "pods", base + "secrets/s0", base + "secrets", apiservertest.GadgetsPath,
		apiservertest.GadgetsPath + "/g1",
		"/apis/apps/v1/deployments", base + "pods/absent", base + "pods?limit=2",
	} {
		for _, as := range []string{
			"", ";as=Table;v=v1;g=meta.k8s.io", ";as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
			";as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
		} {
			includes := []string{""}
			if strings.Contains(as, "Table") {
				includes = []string{"includeObject=None", "includeObject=Metadata", "includeObject=Object"}
			}
			for _, include := range includes {
				url := path
				if include != "" {
					sep := "?"
					if strings.Contains(path, "?") {
						sep = "&"
					}
					url += sep + include
				}
				want := r.Call(c, "GET", url, "", "Accept", "application/json"+as)
				for _, media := range []string{"application/yaml", "application/cbor"} {
					got := r.Call(c, "GET", url, "", "Accept", media+as)
					if got.Code != want.Code || !strings.HasPrefix(got.Header.Get("Content-Type"), media) {
						t.Errorf("%s as %s%s: %d %s, as JSON %d", url, media, as, got.Code,
							got.Header.Get("Content-Type"), want.Code)
						continue
					}
					if want.Code == http.StatusNotAcceptable {
						continue
					}
					if g, w := apiservertest.Plain(t, media, []byte(got.Body)),
						apiservertest.Plain(t, "", []byte(want.Body)); !reflect.DeepEqual(withoutAges(g),
						withoutAges(w)) {
						t.Errorf("%s as %s%s:\n%v\nas JSON:\n%v", url, media, as, g, w)
					}
				}
			}
		}
	}
}

// withoutAges returns a value without the ages in a table, which differ between responses.
func withoutAges(v any) any {
	table, ok := v.(map[string]any)
	if !ok || table["kind"] != "Table" {
		return v
	}
	columns, _ := table["columnDefinitions"].([]any)
	rows, _ := table["rows"].([]any)
	for i, column := range columns {
		if column.(map[string]any)["name"] != "Age" {
			continue
		}
		for _, row := range rows {
			row.(map[string]any)["cells"].([]any)[i] = "age"
		}
	}
	return v
}

// client-go uses CBOR for all requests if configured so, with kinds that have a Go type and with
// custom objects.
func TestClientGoUsesCBOR(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	if err := r.Kinds.Register(apiservertest.GadgetKind()); err != nil {
		t.Fatal(err)
	}
	conf, media := r.CborConfig(t)
	c, err := kubernetes.NewForConfig(conf)
	if err != nil {
		t.Fatal(err)
	}
	secrets := c.CoreV1().Secrets("default")
	made, err := secrets.Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"},
		Data: map[string][]byte{"k": {0, 0xff}}}, metav1.CreateOptions{})
	if err != nil || !bytes.Equal(made.Data["k"], []byte{0, 0xff}) {
		t.Fatalf("%v %v", made, err)
	}
	w, err := secrets.Watch(ctx, metav1.ListOptions{ResourceVersion: made.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	if _, err := secrets.Apply(ctx, coreapply.Secret("s", "default").WithData(map[string][]byte{"own": []byte("mine")}),
		metav1.ApplyOptions{FieldManager: "m"}); err != nil {
		t.Fatal(err)
	}
	if ev := <-w.ResultChan(); ev.Type != watch.Modified || string(ev.Object.(*corev1.Secret).Data["own"]) != "mine" {
		t.Errorf("%+v", ev)
	}
	if _, err := secrets.Get(ctx, "absent", metav1.GetOptions{}); err == nil ||
		!strings.Contains(err.Error(), `secrets "absent" not found`) {
		t.Errorf("absent: %v", err)
	}
	labels := map[string]string{"a": "b"}
	deployment := appsapply.Deployment("d", "default").WithSpec(appsapply.DeploymentSpec().WithReplicas(2).
		WithSelector(metaapply.LabelSelector().WithMatchLabels(labels)).
		WithTemplate(coreapply.PodTemplateSpec().WithLabels(labels).WithSpec(coreapply.PodSpec().
			WithContainers(coreapply.Container().WithName("c").WithImage("i")))))
	if _, err := c.AppsV1().Deployments("default").Apply(ctx, deployment,
		metav1.ApplyOptions{FieldManager: "m"}); err != nil {
		t.Fatal(err)
	}
	scale, err := c.AppsV1().Deployments("default").GetScale(ctx, "d", metav1.GetOptions{})
	if err != nil || scale.Spec.Replicas != 2 {
		t.Errorf("%v %v", scale, err)
	}
	if err := secrets.Delete(ctx, "s", *metav1.NewPreconditionDeleteOptions("other")); err == nil ||
		!strings.Contains(err.Error(), "Precondition failed") {
		t.Errorf("a precondition in CBOR: %v", err)
	}
	r.GadgetsIn(t, conf)
	for _, want := range []string{"> application/cbor", "> application/apply-patch+cbor", "< application/cbor",
		"< application/cbor-seq"} {
		if media.Seen[want] == 0 {
			t.Errorf("nothing was sent as %s: %v", want, media.Seen)
		}
	}
	if media.Seen["< application/json"] > 0 {
		t.Errorf("JSON was answered: %v", media.Seen)
	}
}

// Invalid CBOR is rejected like invalid JSON: unknown fields by the fieldValidation of the client,
// duplicate keys, wrong types, values beyond the limits of depth and size, and bodies that are not
// CBOR.
func TestInvalidCBORIsRejected(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	const maps = "/api/v1/namespaces/default/configmaps"
	encode := func(v any) string {
		data, err := direct.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	post := func(query, body string) apiservertest.Response {
		return r.Call(c, "POST", maps+"?dryRun=All"+query, body, "Content-Type", "application/cbor")
	}
	meta := map[string]any{"name": "x"}
	unknown := encode(map[string]any{"metadata": meta, "foo": 1})
	apiservertest.Refused(t, post("&fieldValidation=Strict", unknown), 400,
		`strict decoding error: unknown field "foo"`)
	if a := post("&fieldValidation=Warn", unknown); a.Code != 201 ||
		!strings.Contains(a.Header.Get("Warning"), `unknown field \"foo\"`) {
		t.Errorf("%d %v", a.Code, a.Header)
	}
	if a := post("&fieldValidation=Ignore", unknown); a.Code != 201 || a.Header.Get("Warning") != "" {
		t.Errorf("%d %v", a.Code, a.Header)
	}
	apiservertest.Refused(t, post("", "\xa2\x61a\x01\x61a\x02"), 400, "duplicate map key")
	apiservertest.Refused(t, post("", encode(map[string]any{"metadata": meta, "data": 1})), 400,
		"data: Invalid value: 1: must be an object")
	apiservertest.Refused(t, post("", encode(map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": meta})), 400,
		"Pod in version")
	apiservertest.Refused(t, post("", "{}"), 400, "must be of type ConfigMap")
	apiservertest.Refused(t, post("", strings.Repeat("\x81", 5000)+"\x01"), 413, "nested more than")
	apiservertest.Refused(t, post("", "\x9b\x00\x00\x00\x00\x7f\xff\xff\xff"), 400, "must be of type ConfigMap")
	many := encode(map[string]any{"metadata": map[string]any{"name": "x", "finalizers": make([]int, 40000)}})
	apiservertest.Refused(t, post("", many), 413, "an object or list of about 40000 values")
	apply := "?fieldManager=m&dryRun=All"
	apiservertest.Refused(t, r.Call(c, "PATCH", maps+"/x"+apply, "\xff", "Content-Type",
		"application/apply-patch+cbor"), 400, "error decoding CBOR")
	apiservertest.Refused(t, r.Call(c, "PATCH", maps+"/x"+apply, strings.Repeat("\x81", 5000), "Content-Type",
		"application/apply-patch+cbor"), 413, "nested")
	one := r.Call(c, "GET", maps, "", "Accept", "application/cbor-seq")
	if said := fmt.Sprint(apiservertest.Plain(t, "application/cbor", []byte(one.Body))); one.Code != 406 ||
		!strings.Contains(said, "protobuf, application/cbor") {
		t.Errorf("a list as a sequence: %d %s", one.Code, said)
	}
}

// F72: a watch with initial events reports their end and its resourceVersion in every media type.
func TestWatchListInEveryMediaType(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	const n = 300
	for i := range n {
		r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("m", i)}})
	}
	yes := true
	o := metav1.ListOptions{SendInitialEvents: &yes, AllowWatchBookmarks: true,
		ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan}
	clientfeaturestesting.SetFeatureDuringTest(t, clientfeatures.ClientsAllowCBOR, true)
	check := func(t *testing.T, w watch.Interface, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		seen := map[string]bool{}
		for ev := range w.ResultChan() {
			o := ev.Object.(metav1.Object)
			if ev.Type == watch.Added {
				seen[o.GetName()] = true
				continue
			}
			if ev.Type != watch.Bookmark || o.GetAnnotations()[metav1.InitialEventsAnnotationKey] != "true" ||
				o.GetResourceVersion() == "" {
				t.Errorf("%s %v", ev.Type, ev.Object)
			}
			break
		}
		if len(seen) != n {
			t.Errorf("%d objects of %d before the bookmark", len(seen), n)
		}
	}
	for _, media := range []string{"application/json", "application/vnd.kubernetes.protobuf", "application/cbor"} {
		t.Run(media, func(t *testing.T) {
			conf := r.ClientConfig("admin", api.GroupMasters)
			conf.ContentType, conf.AcceptContentTypes = media, media
			c, err := kubernetes.NewForConfig(conf)
			if err != nil {
				t.Fatal(err)
			}
			w, err := c.CoreV1().ConfigMaps("default").Watch(ctx, o)
			check(t, w, err)
			m, err := metadata.NewForConfig(conf)
			if err != nil {
				t.Fatal(err)
			}
			w, err = m.Resource(corev1.SchemeGroupVersion.WithResource("configmaps")).Namespace("default").Watch(ctx, o)
			check(t, w, err)
		})
	}
}

// The pod subresources that change running pods respond in every media type.
func TestPodSubresourcesInEveryMediaType(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	asking := apiservertest.NewPod("p")
	asking.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("1")}
	r.Must(asking)
	clientfeaturestesting.SetFeatureDuringTest(t, clientfeatures.ClientsAllowCBOR, true)
	for i, media := range []string{"application/json", "application/vnd.kubernetes.protobuf", "application/cbor"} {
		conf := r.ClientConfig("admin", api.GroupMasters)
		conf.ContentType, conf.AcceptContentTypes = media, media
		c, err := kubernetes.NewForConfig(conf)
		if err != nil {
			t.Fatal(err)
		}
		pods := c.CoreV1().Pods("default")
		got, err := pods.Get(ctx, "p", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, facet := range []string{"resize", "ephemeralcontainers"} {
			read := &corev1.Pod{}
			err := c.CoreV1().RESTClient().Get().Namespace("default").Resource("pods").Name("p").SubResource(facet).Do(
				ctx).Into(read)
			if err != nil || read.UID != got.UID {
				t.Errorf("%s: reading %s: %v %v", media, facet, read.Name, err)
			}
			if _, err := pods.Patch(ctx, "p", types.StrategicMergePatchType, []byte("{}"), metav1.PatchOptions{},
				facet); err != nil {
				t.Errorf("%s: an empty patch of %s: %v", media, facet, err)
			}
		}
		more := got.DeepCopy()
		want := *resource.NewQuantity(int64(7+i), resource.DecimalSI)
		more.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": want}
		now, err := pods.UpdateResize(ctx, "p", more, metav1.UpdateOptions{})
		if err != nil || now.Spec.Containers[0].Resources.Requests.Cpu().Cmp(want) != 0 ||
			now.Generation != got.Generation+1 {
			t.Errorf("%s: resize: %v %v", media, now, err)
		}
		none := now.DeepCopy()
		none.Spec.Containers[0].Resources.Requests = nil
		if _, err := pods.UpdateResize(ctx, "p", none, metav1.UpdateOptions{}); err == nil ||
			!strings.Contains(err.Error(), "spec.containers[0].resources.requests: Forbidden: resource requests "+
				"cannot be removed") {
			t.Errorf("%s: resize to nothing: %v", media, err)
		}
		debug := now.DeepCopy()
		debug.Spec.EphemeralContainers = append(debug.Spec.EphemeralContainers, corev1.EphemeralContainer{
			EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: fmt.Sprint("d", i), Image: "i"}})
		added, err := pods.UpdateEphemeralContainers(ctx, "p", debug, metav1.UpdateOptions{})
		if err != nil || len(added.Spec.EphemeralContainers) != i+1 || added.Generation != now.Generation+1 {
			t.Errorf("%s: debug: %v %v", media, added, err)
		}
	}
}

package api

import (
	"net/url"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// F47: both encodings, of objects and of the documents around them.
func TestCodecs(t *testing.T) {
	s := Scheme()
	factory := Codecs(s)
	v1 := schema.GroupVersion{Version: "v1"}
	for _, media := range []string{"application/json", "application/yaml", "application/vnd.kubernetes.protobuf"} {
		info, ok := runtime.SerializerInfoForMediaType(factory.SupportedMediaTypes(), media)
		if !ok {
			t.Fatalf("no serializer for %s", media)
		}
		codec := factory.CodecForVersions(info.Serializer, info.Serializer, v1, v1)
		for _, in := range []runtime.Object{
			&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: corev1.PodSpec{NodeName: "w1"}},
			&metav1.Status{Message: "no"},
		} {
			data, err := runtime.Encode(codec, in)
			if err != nil {
				t.Fatalf("%s: encoding %T: %v", media, in, err)
			}
			out, err := runtime.Decode(codec, data)
			if err != nil {
				t.Fatalf("%s: decoding %T: %v", media, in, err)
			}
			if p, ok := out.(*corev1.Pod); ok && p.Spec.NodeName != "w1" {
				t.Errorf("%s: got %+v", media, p)
			}
		}
	}
	for _, o := range []runtime.Object{&metav1.Table{}, &metav1.PartialObjectMetadata{},
		&metav1.PartialObjectMetadataList{}, &metav1.APIResourceList{}} {
		if _, _, err := s.ObjectKinds(o); err != nil {
			t.Errorf("%T: %v", o, err)
		}
	}
}

func TestParameterCodec(t *testing.T) {
	var o metav1.ListOptions
	q := url.Values{"watch": {"true"}, "resourceVersion": {"7"}, "limit": {"3"}}
	if err := ParameterCodec(Scheme()).DecodeParameters(q, schema.GroupVersion{Version: "v1"}, &o); err != nil ||
		!o.Watch || o.ResourceVersion != "7" || o.Limit != 3 {
		t.Errorf("%+v, %v", o, err)
	}
}

func FuzzTraceID(f *testing.F) {
	const id = "0af7651916cd43dd8448eb211c80319c"
	f.Add("00-" + id + "-b7ad6b7169203331-01")
	f.Add("")
	f.Fuzz(func(t *testing.T, s string) {
		if got := TraceID(s); got != "" && (len(got) != len(id) || s[3:35] != got) {
			t.Errorf("%q gave %q", s, got)
		}
	})
	if got := TraceID("00-" + id + "-b7ad6b7169203331-01"); got != id {
		f.Errorf("got %q", got)
	}
	if got := TraceID("00-" + id[1:] + "Z-b7ad6b7169203331-01"); got != "" {
		f.Errorf("a malformed parent gave %q", got)
	}
}

package custom

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
)

const widget = `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"a","namespace":"n",` +
	`"labels":{"l":"1"}},` +
	`"spec":{"big":9007199254740993,"huge":18446744073709551616,"float":1.5,"list":[1,{"a":null}],"on":true},` +
	`"status":{"n":1}}`

func decode(t testing.TB, text string) *Object {
	t.Helper()
	o := &Object{}
	if err := json.Unmarshal([]byte(text), o); err != nil {
		t.Fatal(err)
	}
	return o
}

// Numbers keep what Kubernetes keeps: integers of 64 bits exactly, what does not fit as floats.
func TestNumbers(t *testing.T) {
	spec := decode(t, widget).Content["spec"].(map[string]any)
	want := map[string]any{"big": int64(9007199254740993), "huge": float64(18446744073709551616),
		"float": 1.5, "on": true,
		"list": []any{int64(1), map[string]any{"a": nil}}}
	if !reflect.DeepEqual(spec, want) {
		t.Fatalf("got %#v", spec)
	}
}

func TestTypedMetadata(t *testing.T) {
	o := decode(t, widget)
	if o.Name != "a" || o.Namespace != "n" || o.Labels["l"] != "1" || o.Kind != "Widget" || len(o.Content) != 2 {
		t.Fatalf("got %+v", o)
	}
	// The generated forms of what it embeds must not be taken for its own.
	if _, ok := any(o).(interface{ Size() int }); ok {
		t.Fatal("a custom object looks as if it had a protobuf form")
	}
	if _, ok := any(o).(interface{ Unmarshal([]byte) error }); ok {
		t.Fatal("a custom object looks as if it could be read from protobuf")
	}
}

// A decoder that meets an object that is not empty replaces it.
func TestDecodingReplaces(t *testing.T) {
	o := decode(t, widget)
	if err := json.Unmarshal([]byte(`{"metadata":{"name":"b"},"data":1}`), o); err != nil {
		t.Fatal(err)
	}
	if o.Name != "b" || o.Namespace != "" || o.Kind != "" ||
		!reflect.DeepEqual(o.Content, map[string]any{"data": int64(1)}) {
		t.Fatalf("got %+v", o)
	}
}

// What is written through one copy is not seen through another, however it was made.
func TestCopiesShareNothingThatIsWritten(t *testing.T) {
	o := decode(t, widget)
	before, _ := json.Marshal(o)
	ops := Ops(true)
	shallow := ops.Shallow(o).(*Object)
	ops.SetStatus(shallow, nil)
	shallow.Set("spec", "gone")
	shallow.SetResourceVersion("7")
	shallow.SetLabels(map[string]string{"l": "2"})
	other := New().(*Object)
	ops.Assign(other, o)
	ops.SetStatus(other, decode(t, `{"status":"mine"}`))
	list := ops.List([]api.Object{o}).(*List)
	list.Items[0].Set("spec", nil)
	deep := o.DeepCopy()
	deep.Content["spec"].(map[string]any)["list"].([]any)[1].(map[string]any)["a"] = "changed"
	deep.Labels["l"] = "3"
	if after, _ := json.Marshal(o); !bytes.Equal(before, after) {
		t.Fatalf("the object became\n%s, it was\n%s", after, before)
	}
	if shallow.Content["spec"] != "gone" || shallow.Content["status"] != nil || other.Content["status"] != "mine" {
		t.Fatalf("the copies are %v and %v", shallow.Content, other.Content)
	}
}

func TestStrict(t *testing.T) {
	o := &Object{}
	told,
		err := api.DecodeJSON(
		[]byte(`{"metadata":{"name":"a","nme":"b"},"spec":{"x":1,"x":2,"y":3},"metadata":{"name":"c"}}`), o, true)
	if err != nil {
		t.Fatal(err)
	}
	got := errors.Join(told...).Error()
	for _, want := range []string{`duplicate field "spec.x"`, `unknown field "metadata.nme"`,
		`duplicate field "metadata"`} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is not told in:\n%s", want, got)
		}
	}
	if strings.Contains(got, `unknown field "spec`) {
		t.Errorf("the content is called unknown:\n%s", got)
	}
}

func TestNoObjects(t *testing.T) {
	for text, want := range map[string]string{
		`[]`:                         "cannot unmarshal",
		`null`:                       "not an object",
		`{"kind":7}`:                 "kind: must be a string",
		`{"metadata":[]}`:            "cannot unmarshal",
		`{"metadata":"x"}`:           "cannot unmarshal",
		`{"a":` + nested(2000) + `}`: "nested more than",
		`{"a":"` + strings.Repeat("x", decodelimits.MaxBytes) + `"}`: "at most",
	} {
		// Directly: encoding/json asks only once it has read a whole document.
		if err := (&Object{}).UnmarshalJSON([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: got %v, want %s", text, err, want)
		}
	}
}

func nested(depth int) string { return strings.Repeat("[", depth) + strings.Repeat("]", depth) }

func TestOpsOfAList(t *testing.T) {
	l := Ops(false).List([]api.Object{decode(t, widget)}).(*List)
	l.ListMeta = metav1.ListMeta{ResourceVersion: "3"}
	data, err := json.Marshal(l)
	if err != nil || !strings.Contains(string(data), `"items":[{"apiVersion":"example.com/v1","kind":"Widget"`) {
		t.Fatalf("%s, %v", data, err)
	}
	if again := l.DeepCopyObject(); !reflect.DeepEqual(again, l) {
		t.Fatalf("the copy is %+v", again)
	}
}

// Whatever can be read is what Kubernetes would read, is written and read again the same, and is copied whole.
func FuzzJSON(f *testing.F) {
	for _, seed := range []string{widget, `{}`, `{"metadata":null,"a":-0,"b":1e400}`,
		`{"a":1.0,"b":1e21,"c":-9223372036854775808}`,
		`{"metadata":{"creationTimestamp":"2020-01-01T00:00:00Z","managedFields":[{"fieldsV1":{"f:a":{}}}]}}`,
		`{"a":"\ud800"}`, nested(50)} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		o := &Object{}
		if err := o.UnmarshalJSON(data); err != nil {
			return
		}
		var theirs map[string]any
		if err := utiljson.Unmarshal(data, &theirs); err != nil {
			t.Fatalf("Kubernetes does not read it: %v", err)
		}
		for _, name := range own {
			delete(theirs, name)
		}
		if len(theirs)+len(o.Content) > 0 && !reflect.DeepEqual(o.Content, theirs) {
			t.Fatalf("read %#v, Kubernetes %#v", o.Content, theirs)
		}
		once, err := json.Marshal(o)
		if err != nil {
			t.Fatalf("not written: %v", err)
		}
		again := &Object{}
		if err := again.UnmarshalJSON(once); err != nil {
			t.Fatalf("%s is not read again: %v", once, err)
		}
		if twice, err := json.Marshal(again); err != nil || !bytes.Equal(once, twice) {
			t.Fatalf("%s became %s (%v)", once, twice, err)
		}
		if c := o.DeepCopy(); !reflect.DeepEqual(c, o) {
			t.Fatalf("the copy of %#v is %#v", o, c)
		}
	})
}

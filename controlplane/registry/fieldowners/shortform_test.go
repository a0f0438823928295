package fieldowners

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/randfill"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/registry/storedform"
)

// The field names of form 1 are part of a disk format and must not change.
func TestFieldNamesStay(t *testing.T) {
	sum := sha256.Sum256([]byte(frequentFields + "|" + knownFields + "|" + fieldCodes + "|" + codeBytes +
		fmt.Sprint(fieldPatterns)))
	if got := hex.EncodeToString(sum[:8]); got != "f2ddc452918bd63c" {
		t.Errorf("the tables of form 1 hash to %s: they are on disk and may not change", got)
	}
	tables := shortForm()
	if n := len(strings.Fields(frequentFields)); n > len(fieldCodes) {
		t.Errorf("%d names for %d codes", n, len(fieldCodes))
	}
	if n := len(strings.Fields(frequentFields + knownFields)); n != len(tables.codes) {
		t.Errorf("%d codes for %d names", len(tables.codes), n)
	}
	for _, c := range []byte(codeBytes) {
		if !isLiteralByte(c) || c == '`' || strings.Count(codeBytes, string(c)) != 1 {
			t.Errorf("%q is not safe", c)
		}
	}
}

func TestFieldForm(t *testing.T) {
	for _, c := range []struct{ set, text string }{
		{`{}`, `""`},
		{`{"f:metadata":{"f:labels":{".":{},"f:app":{}}}}`, `"(a(c.5[))"`},
		{`{"f:data":{"f:free name":{}}}`, `"(S'free name')"`},
		{`{"k:{\"name\":\"main\"}":{".":{},"f:image":{}}}`, `"({Amain'.l)"`},
		{`{"k:{\"containerPort\":8080,\"protocol\":\"TCP\"}":{}}`, `"{F8080'"`},
		{`{"v:\"example.org/a\"":{},"v:7":{},"i:3":{}}`, "\"{Kexample.org/a':v:7':i:3'\""},
		{`{"k:{\"a\":\"b\",\"c\":1}":{}}`, "\":k:{`a`:`b`,`c`:1}'\""},
		// Names that cannot be encoded in the form are stored as they are.
		{`{"f:it's":{}}`, ""}, {"{\"f:`\":{}}", ""}, {`{"f:\u003c":{}}`, ""}, {`{"f:<":{}}`, ""}, {`{"f:ü":{}}`, ""},
		{`{ }`, ""}, {`{"f:a":1}`, ""}, {`{"f:a":{}`, ""}, {`{"f:a":{}}x`, ""}, {``, ""}, {`"x"`, ""},
		{`{"f:a":{},}`, ""},
		{`{"\`, ""}, {strings.Repeat(`{"f:a":`, 100) + `{}` + strings.Repeat(`}`, 100), ""},
	} {
		got, ok := encodeSet([]byte("x"), []byte(c.set))
		if !ok {
			got = append(got, c.text...)
			if c.text != "" {
				t.Errorf("%s does not fit the form", c.set)
			}
			continue
		}
		if string(got[1:]) != c.text {
			t.Errorf("%s is written as %s, want %s", c.set, got[1:], c.text)
		}
		back, err := decodeSet([]byte("y"), got[1:])
		if err != nil || string(back[1:]) != c.set {
			t.Errorf("%s came back as %s (%v)", c.set, back[1:], err)
		}
	}
}

// Invalid text of the form is rejected, or decodes to a set of bounded size, without a panic.
func TestHostileFieldForm(t *testing.T) {
	for _, text := range []string{
		``, `"`, `x`, `"x`, `")"`, `"("`, `"(a"`, `"(a))"`, `"'a"`, `"{"`, `"{Z'"`, `"{A"`, `"0"`, `"9~"`, "\"'\x00'\"",
		`"'"'"`, `"'\'"`, "\"\xff\"",
		`"` + strings.Repeat("(a", 100_000) + `"`, `"` + strings.Repeat("{F1'", 100_000) + `"`,
		`"` + strings.Repeat("0X", 1<<20) + `"`,
	} {
		if out, err := decodeSet(nil, []byte(text)); err == nil {
			t.Errorf("%.20q was read as %.40q", text, out)
		}
	}
}

func FuzzFieldForm(f *testing.F) {
	f.Add([]byte(`"(a(c.5[))({Amain'.l)"`), []byte(`{"f:metadata":{"k:{\"name\":\"main\"}":{".":{}},"v:\"x\"":{}}}`))
	c, share := storedform.NewCodec(kinds.All().ByGVK(corev1.SchemeGroupVersion.WithKind("ConfigMap")).Storage),
		NewSetShare()
	f.Fuzz(func(t *testing.T, text, set []byte) {
		if out, err := decodeSet(nil, text); err == nil {
			if len(out) > 2*maxFieldBytes || !json.Valid(out) || !json.Valid(text) {
				t.Fatalf("%q was read as %q", text, out)
			}
		}
		if packed, ok := encodeSet(nil, set); ok {
			back, err := decodeSet(nil, packed)
			if err != nil || !bytes.Equal(back, set) {
				t.Fatalf("%q was written as %q and read as %q (%v)", set, packed, back, err)
			}
		}
		// As in a stored object.
		obj := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}}
		obj.ManagedFields = []metav1.ManagedFieldsEntry{{FieldsType: typeCompact,
			FieldsV1: &metav1.FieldsV1{Raw: text}}}
		data, err := c.Encode(obj)
		if err != nil {
			t.Fatal(err)
		}
		read, _, err := c.Decode(data)
		if err != nil {
			t.Fatal(err)
		}
		unknown := share.ShareFields(read)
		if len(unknown)+len(read.GetManagedFields()) != 1 {
			t.Fatalf("%q is in %d entries", text, len(unknown)+len(read.GetManagedFields()))
		}
		if _, err := storedform.EncodeJSON(read); err != nil {
			t.Fatal(err)
		}
	})
}

// For random objects of every kind, the owned fields equal those of the field manager, survive
// encoding in the form, and take less space.
func TestFieldFormOfEveryKind(t *testing.T) {
	table := kinds.All()
	tracker := NewTracker(api.Scheme(), table)
	fill := randfill.NewWithSeed(7).NilChance(.4).NumElements(1, 3).MaxDepth(12).Funcs(
		func(f *metav1.FieldsV1, _ randfill.Continue) { f.Raw = []byte(`{}`) },
		func(o *runtime.RawExtension, _ randfill.Continue) {},
		func(s *string, c randfill.Continue) { *s = fmt.Sprint("s", c.Intn(1000)) },
		func(s *types.UID, c randfill.Continue) { *s = types.UID(fmt.Sprint("u", c.Intn(1000))) },
		func(s *corev1.ResourceName, c randfill.Continue) {
			*s = corev1.ResourceName(fmt.Sprint("r", c.Intn(9)))
		},
		func(s *corev1.Protocol, c randfill.Continue) { *s = corev1.ProtocolTCP },
		func(s *flowcontrolv1.FlowSchemaConditionType, c randfill.Continue) { // a map key, which is never empty
			*s = flowcontrolv1.FlowSchemaConditionType(fmt.Sprint("t", c.Intn(1000)))
		},
		func(s *flowcontrolv1.PriorityLevelConfigurationConditionType, c randfill.Continue) {
			*s = flowcontrolv1.PriorityLevelConfigurationConditionType(fmt.Sprint("t", c.Intn(1000)))
		},
		func(j *apiextensionsv1.JSON, c randfill.Continue) { j.Raw = fmt.Append(nil, c.Intn(1000)) },
		func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewQuantity(c.Int63n(1000), resource.DecimalSI)
		},
	)
	var long, short, fitted int
	for _, k := range table.All() {
		if k.Serving.Virtual {
			continue
		}
		for range 3 {
			obj := k.Type.New()
			if reflect.TypeOf(obj).Elem().Kind() != reflect.Struct {
				continue
			}
			fill.Fill(obj)
			k.SetTypeMeta(obj)
			obj.SetManagedFields(nil)
			state := &KindState{}
			empty := k.Type.New()
			k.SetTypeMeta(empty)
			fm, err := tracker.Manager(state, k, "")
			if err != nil {
				t.Fatal(err)
			}
			want := entriesOf(fm.UpdateNoErrors(empty, obj.DeepCopyObject(), "m").(api.Object))
			setEntries(tracker, state, k, obj)
			if got := entriesOf(obj); !reflect.DeepEqual(got, want) {
				t.Errorf("%s: the creator owns %.2000v, the field manager gives %.2000v", k.Resource, got, want)
			}
			for _, e := range obj.GetManagedFields() {
				packed, ok := encodeSet(nil, e.FieldsV1.Raw)
				if !ok {
					if !strings.ContainsFunc(string(e.FieldsV1.Raw), func(r rune) bool {
						return r > 0x7e || strings.ContainsRune("\\'`<>&", r)
					}) {
						t.Errorf("%s: %.200s does not fit the form", k.Resource, e.FieldsV1.Raw)
					}
					continue
				}
				fitted++
				back, err := decodeSet(nil, packed)
				if err != nil || !bytes.Equal(back, e.FieldsV1.Raw) {
					t.Errorf("%s: %s came back as %s (%v)", k.Resource, e.FieldsV1.Raw, back, err)
				}
				long, short = long+len(e.FieldsV1.Raw), short+len(packed)
			}
		}
	}
	t.Logf("%d sets: %d bytes for %d", fitted, short, long)
	if short*3 > long || fitted < len(table.All()) {
		t.Errorf("%d sets: %d bytes became %d", fitted, long, short)
	}
}

// setEntries sets the managedFields of a new object, as for a creation by manager m.
func setEntries(tracker *Tracker, state *KindState, k *api.Kind, obj api.Object) {
	if n := tracker.NewObjects(state, k); n != nil {
		if entries, err := n.Entries(obj, "m", k.GVK.GroupVersion().String(), metav1.Time{}); err == nil {
			obj.SetManagedFields(entries)
			return
		}
	}
	fm, err := tracker.Manager(state, k, "")
	if err != nil {
		panic(err)
	}
	empty := k.Type.New()
	k.SetTypeMeta(empty)
	fm.UpdateNoErrors(empty, obj, "m")
}

// entriesOf returns managedFields without times, in a fixed order.
func entriesOf(obj api.Object) []metav1.ManagedFieldsEntry {
	out := append([]metav1.ManagedFieldsEntry(nil), obj.GetManagedFields()...)
	for i := range out {
		out[i].Time = nil
	}
	slices.SortFunc(out, func(a, b metav1.ManagedFieldsEntry) int {
		return strings.Compare(fmt.Sprint(a.Operation, a.Subresource, a.Manager, a.APIVersion),
			fmt.Sprint(b.Operation, b.Subresource, b.Manager, b.APIVersion))
	})
	return out
}

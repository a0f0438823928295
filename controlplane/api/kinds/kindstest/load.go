// Package kindstest contains the functions that the tests of the kinds share: they load objects,
// and compare errors, changes and table rows with those of Kubernetes. It imports package kinds, so
// only external test packages may use it.
package kindstest

import (
	"fmt"
	"math/rand"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/randfill"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// CheckDefaults fails the test if an object with its defaults differs from the expected YAML.
func CheckDefaults[P api.Object](t *testing.T, text, want string) {
	t.Helper()
	o := Load[P](t, text)
	var wantMap, gotMap map[string]any
	data, err := yaml.Marshal(o)
	if err == nil {
		err = yaml.Unmarshal(data, &gotMap)
	}
	if err == nil {
		err = yaml.Unmarshal([]byte(want), &wantMap)
	}
	if err != nil {
		t.Fatal(err)
	}
	delete(gotMap, "metadata")
	delete(gotMap, "status")
	delete(wantMap, "metadata")
	if d := cmp.Diff(wantMap, gotMap); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// Now is the time at which the tests print tables.
var Now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// Load parses the YAML of an object and sets its defaults, as the API server does before
// validation.
func Load[P api.Object](t *testing.T, text string) P {
	t.Helper()
	var zero P
	k := kinds.All().ByType(zero)
	o := k.Type.New()
	if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	if o.GetNamespace() == "" && k.Namespaced {
		o.SetNamespace("default")
	}
	if k.Writes.Default != nil {
		k.Writes.Default(o)
	}
	return o.(P)
}

// NewFiller returns a filler that sets every field of an object to random values, which may be
// invalid.
func NewFiller(seed int64) *randfill.Filler {
	return randfill.New().RandSource(rand.NewSource(seed)).NilChance(0.4).NumElements(0, 3).MaxDepth(14).Funcs(
		func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewMilliQuantity(c.Int63n(5000)-500, resource.DecimalSI)
		},
		func(x *metav1.Time, c randfill.Continue) {
			*x = metav1.NewTime(Now.Add(-time.Duration(c.Int63n(int64(time.Hour)))))
		},
		func(x *metav1.MicroTime, c randfill.Continue) { *x = metav1.NewMicroTime(Now) },
		func(x *intstr.IntOrString, c randfill.Continue) { *x = intstr.FromInt32(int32(c.Intn(70000))) },
		func(x *runtime.RawExtension, _ randfill.Continue) {},
		func(x *metav1.FieldsV1, _ randfill.Continue) {},
		func(x *storagev1.VolumeAttachmentSource, c randfill.Continue) {},
		func(x *corev1.ServiceType, c randfill.Continue) {
			*x = []corev1.ServiceType{"", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "Other"}[c.Intn(6)]
		},
	)
}

// PodText is the YAML of a valid pod.
const PodText = `
metadata: {name: web}
spec:
  containers:
  - {name: web, image: nginx}
`

// Ago returns the time that is the given duration before Now.
func Ago(age time.Duration) metav1.Time { return metav1.NewTime(Now.Add(-age)) }

// PrintTable returns the header and the row that "kubectl get -o wide" prints for an object. Cells
// are separated by "|". The cells of wide columns start with "+".
func PrintTable[P api.Object](t *testing.T, text string) string {
	t.Helper()
	o := Load[P](t, text)
	o.SetCreationTimestamp(Ago(3 * time.Hour))
	k := kinds.All().ByType(o)
	var head, cells []string
	for i, c := range k.Lists.Row(o, Now) {
		name, cell := strings.ToUpper(k.Lists.Columns[i].Name), fmt.Sprint(c)
		if k.Lists.Columns[i].Priority > 0 {
			name, cell = "+"+name, "+"+cell
		}
		head, cells = append(head, name), append(cells, cell)
	}
	return strings.Join(head, "|") + "\n" + strings.Join(cells, "|")
}

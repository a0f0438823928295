package decodelimits

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// podWith returns the JSON of a pod whose container requests the CPU quantity cpu, which is a JSON
// value.
func podWith(cpu string) string {
	return `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","annotations":{"long":"` +
		strings.Repeat("1", 5000) + `"}},"spec":{"containers":[` +
		`{"name":"main","resources":{"requests":{"cpu":` + cpu +
		`}}}],"volumes":[{"name":"v","emptyDir":{"sizeLimit":"1Gi"}}]}}`
}

// A quantity of very many digits is refused before it is parsed, in every form in which it can be sent.
func TestLongQuantities(t *testing.T) {
	digits := strings.Repeat("9", 900000)
	for name, cpu := range map[string]string{
		"text": `"` + digits + `"`, "a number": digits, "a fraction": `"0.` + digits + `"`,
		"an exponent": `"1e` + digits + `"`,
		"a sign":      `"-` + digits + `m"`, "spaces": `"   ` + digits + `"`,
		"escapes": `"` + strings.Repeat(`\u0039`, 1000) + `"`,
	} {
		began := time.Now()
		err := CheckJSON([]byte(podWith(cpu)), &corev1.Pod{})
		if !errors.Is(err, ErrTooMuch) ||
			!strings.Contains(fmt.Sprint(err), "spec.containers[0].resources.requests.cpu: quantity has ") {
			t.Errorf("%s: %v", name, err)
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("%s took %v", name, took)
		}
	}
	for _, cpu := range []string{`"1e-2000000000"`, "1e-2000000000", `"1E+1000"`, `"1\u0065-2000000000"`,
		`" 1e-2000000000 "`, `"\u00a01e-2000000000"`} {
		err := CheckJSON([]byte(podWith(cpu)), &corev1.Pod{})
		if !errors.Is(err, ErrTooMuch) || !strings.Contains(fmt.Sprint(err),
			"spec.containers[0].resources.requests.cpu: the exponent of the quantity has ") {
			t.Errorf("%s: %v", cpu, err)
		}
	}
	for _, cpu := range []string{`"1"`, "1", "0.5", `"1e-9"`, "1E999", `"100m"`, `"1e3"`,
		`"` + strings.Repeat("0", 100) + `1"`, `"x"`, "null"} {
		if err := CheckJSON([]byte(podWith(cpu)), &corev1.Pod{}); err != nil {
			t.Errorf("%s: %v", cpu, err)
		}
	}
	if err := CheckJSON([]byte(`{"data":{"pi":"3.`+digits+`"}}`), &corev1.ConfigMap{}); err != nil {
		t.Errorf("text that is no quantity: %v", err)
	}
	if err := CheckJSON([]byte(`{"sizeLimit":"`+digits+`"}`), &corev1.EmptyDirVolumeSource{}); !errors.Is(err,
		ErrTooMuch) {
		t.Errorf("behind a pointer: %v", err)
	}
}

// Long quantities are refused in protobuf too.
func TestLongQuantitiesInProtobuf(t *testing.T) {
	pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{
		Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("123456789.123456789")}}}}}}
	data, err := pod.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if err := CheckProto(data, pod); err != nil {
		t.Error(err)
	}
	long := strings.Repeat("9", 100) + "e" + strings.Repeat("9", 1000)
	inner := string([]byte{0x0a, 0xcd, 0x08}) + long // field 1 of 1,101 bytes
	list := string([]byte{0x0a, 3}) + "cpu" + string([]byte{0x12, 0xd0, 0x08}) + inner
	if err := CheckProto(nested(list, 2, 8, 2, 2), pod); !errors.Is(err, ErrTooMuch) {
		t.Errorf("a quantity of %d bytes: %v", len(long), err)
	}
	small := "1e-2000000000"
	list = string([]byte{0x0a, 3}) + "cpu" + string([]byte{0x12, byte(len(small) + 2), 0x0a, byte(len(small))}) + small
	if err := CheckProto(nested(list, 2, 8, 2, 2), pod); !errors.Is(err, ErrTooMuch) {
		t.Errorf("the quantity %s: %v", small, err)
	}
}

// nested returns in, wrapped into one message for each field; the first field is the innermost.
func nested(in string, fields ...int) []byte {
	for _, f := range fields {
		n := len(in)
		in = string([]byte{byte(f<<3 | 2), byte(n)&0x7f | 0x80, byte(n >> 7)}) + in
	}
	return []byte(in)
}

// What passes has no quantity that is longer than the bound, and is refused for nothing else.
func FuzzQuantities(f *testing.F) {
	for _, cpu := range []string{`"1"`, strings.Repeat("9", 200), `"` + strings.Repeat("9", 200) + `"`,
		`"\u0039` + strings.Repeat("9", 200) + `"`} {
		f.Add([]byte(podWith(cpu)))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var p corev1.Pod
		err := CheckQuantities(data, &p)
		if len(data) < MaxQuantity && err != nil && !strings.Contains(err.Error(), "exponent") {
			t.Fatalf("%s: %v", data, err)
		}
		if err != nil || json.Unmarshal(data, &p) != nil {
			return
		}
		for _, c := range p.Spec.Containers {
			for _, q := range c.Resources.Requests {
				if len(q.String()) > 2*MaxQuantity {
					t.Fatalf("%s passed", q.String())
				}
			}
		}
	})
}

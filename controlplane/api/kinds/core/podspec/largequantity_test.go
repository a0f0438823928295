package podspec_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
)

// F38: page sizes that take long to parse or do not fit an int64 are refused, and large whole numbers are whole.
func TestLargeQuantities(t *testing.T) {
	for _, c := range []struct {
		name  corev1.ResourceName
		value string
		wrong bool
	}{
		{"hugepages-2Mi", "4Mi", false},
		{"hugepages-2Mi", "3Mi", true},
		{"hugepages-1e-2000000000", "1", true},
		{"hugepages-1e2000000000", "1", true},
		{"hugepages-100E", "1Gi", true},
		{"hugepages-1m", "1Gi", true},
	} {
		began := time.Now()
		errs := podspec.ValidateHugePages(c.name, resource.MustParse(c.value), field.NewPath("at"))
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("%s took %v", c.name, took)
		}
		if (len(errs) > 0) != c.wrong {
			t.Errorf("%s of %s: %v", c.value, c.name, errs)
		}
	}
	for value, wrong := range map[string]bool{"1": false, "9E": false, "9E1": false, "100E": false, "500m": true,
		"1e-9": true, "9000000000000000000.5": true} {
		errs := podspec.ValidateCountedQuantity("example.com/device", resource.MustParse(value), field.NewPath("at"))
		if (len(errs) > 0) != wrong {
			t.Errorf("%s devices: %v", value, errs)
		}
	}
}

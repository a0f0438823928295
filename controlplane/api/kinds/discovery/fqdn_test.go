package discovery_test

import (
	"slices"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// F116: slices of addressType FQDN are stored with a warning; nodes ignore them.
func TestFQDNSlices(t *testing.T) {
	slice := kindstest.Load[*discoveryv1.EndpointSlice](t,
		"{metadata: {name: a}, addressType: FQDN, ports: [{port: 80}], endpoints: [{addresses: [www.example.com]}]}")
	k := kinds.All().ByType(slice)
	errs, warnings := k.Schema.Answers.FindIneffective(slice, nil)
	if errs = append(errs, k.ValidateObject(slice, nil)...); len(errs) > 0 {
		t.Error(errs)
	}
	warnings = append(warnings, kinds.ObjectWarnings(slice, nil)...)
	want := "spec.addressType: FQDN endpoints are deprecated"
	if !slices.Equal(warnings, []string{want}) {
		t.Errorf("warnings %q", warnings)
	}
	kindstest.CheckRefused[*discoveryv1.EndpointSlice](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, addressType: FQDN, endpoints: [{addresses: [a.]}]}",
			Want: kindstest.InvalidText("endpoints[0].addresses[0]", "a",
				"should be a domain with at least two segments separated by dots")})
}

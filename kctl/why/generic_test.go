package why

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// Gateway API says what is wrong in the conditions of listeners and of routes' parents too. F126
func TestGatewayAPI(t *testing.T) {
	for _, c := range []struct{ object, want string }{
		{`kind: Gateway
apiVersion: gateway.networking.k8s.io/v1
metadata: {name: web, namespace: shop}
status:
  conditions: [{type: Accepted, status: "True", reason: ListenersNotValid, message: m}, {type: Programmed, status: "False", reason: AddressNotAssigned, message: no pool}]
  listeners:
  - {name: https, conditions: [{type: ResolvedRefs, status: "False", reason: InvalidCertificateRef, message: no Secret}, {type: Conflicted, status: "False", reason: NoConflicts}]}
  - {name: both, conditions: [{type: OverlappingTLSConfig, status: "True", reason: OverlappingHostnames, message: hosts}]}`,
			"condition Programmed is False: AddressNotAssigned: no pool\n" +
				"condition ResolvedRefs of listener https is False: InvalidCertificateRef: no Secret\n" +
				"condition OverlappingTLSConfig of listener both is True: OverlappingHostnames: hosts\n"},
		{`kind: HTTPRoute
apiVersion: gateway.networking.k8s.io/v1
metadata: {name: r, namespace: shop}
status:
  parents:
  - {parentRef: {name: web}, conditions: [{type: Accepted, status: "False", reason: NoMatchingParent, message: none}]}
  - {parentRef: {name: other}, conditions: [{type: Accepted, status: "True"}, {type: PartiallyInvalid, status: "True", reason: UnsupportedValue, message: Dropped Rule}]}`,
			"condition Accepted for web is False: NoMatchingParent: none\n" +
				"condition PartiallyInvalid for other is True: UnsupportedValue: Dropped Rule\n"},
	} {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(c.object), &u.Object); err != nil {
			t.Fatal(err)
		}
		r := Explain(&World{Now: time.Now()}, u)
		var got strings.Builder
		for _, f := range r.Findings {
			got.WriteString(f.What + ": " + f.Because + "\n")
		}
		if got.String() != c.want || r.Well != "" {
			t.Errorf("got:\n%s%s\nwant:\n%s", got.String(), r.Well, c.want)
		}
	}
}

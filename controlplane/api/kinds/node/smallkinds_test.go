package node_test

import (
	"strings"
	"testing"

	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestRuntimeClass(t *testing.T) {
	class := func(rest string) string { return "{metadata: {name: a}, handler: h, " + rest + "}" }
	kindstest.CheckRefused[*nodev1.RuntimeClass](t,
		kindstest.BadObject{Text: class("overhead: {podFixed: {cpu: 10m}}, scheduling: {nodeSelector: {a: b}, " +
			"tolerations: [{key: k, operator: Exists}]}"), Want: ""},
		kindstest.BadObject{Text: "{metadata: {name: a}}", Want: "handler: Required value"},
		kindstest.BadObject{Text: "{metadata: {name: a}, handler: H}",
			Want: kindstest.InvalidText("handler", "H", kindstest.NotLabel)},
		kindstest.BadObject{Text: "{metadata: {name: a}, handler: a.b}",
			Want: kindstest.InvalidText("handler", "a.b", validation.IsDNS1123Label("a.b")[0])},
		kindstest.BadObject{Text: "{metadata: {name: a}, handler: " + strings.Repeat("a", 64) + "}",
			Want: kindstest.InvalidText("handler", strings.Repeat("a", 64), "must be no more than 63 characters")},
		kindstest.BadObject{Text: class("overhead: {podFixed: {cpu: -1}}"),
			Want: kindstest.InvalidText("overhead.limits[cpu]", "-1", "must be greater than or equal to 0")},
		kindstest.BadObject{Text: class("overhead: {podFixed: {beans: 1}}"),
			Want: kindstest.InvalidText("overhead.limits[beans]", "beans",
				"must be a standard resource type or fully qualified") +
				"\n" + kindstest.InvalidText("overhead.limits[beans]", "beans",
				"must be a standard resource for containers")},
		kindstest.BadObject{Text: class("scheduling: {nodeSelector: {a b: c}}"),
			Want: kindstest.InvalidText("scheduling.nodeSelector", "a b", validation.IsQualifiedName("a b")[0])},
		kindstest.BadObject{Text: class("scheduling: {nodeSelector: {a: c d}}"),
			Want: kindstest.InvalidText("scheduling.nodeSelector", "c d", validation.IsValidLabelValue("c d")[0])},
		kindstest.BadObject{Text: class("scheduling: {tolerations: [{key: k, operator: Near}]}"),
			Want: `scheduling.tolerations[0].operator: Unsupported value: "Near": supported values: "Equal", "Exists"`},
		kindstest.BadObject{Text: class("scheduling: {tolerations: [{key: k, operator: Exists, value: v}]}"),
			Want: "scheduling.tolerations[0].operator: Invalid value: \"v\": value must be empty when " +
				"`operator` is 'Exists'"},
	)
	twice := class("scheduling: {tolerations: [{key: k, operator: Exists}, {key: j}, {key: k, operator: Exists, " +
		"tolerationSeconds: 1}]}")
	kindstest.CheckRefused[*nodev1.RuntimeClass](t,
		kindstest.BadObject{Text: twice, Want: `scheduling.tolerations[2].effect: Invalid value: "": effect must be ` +
			`'NoExecute' when ` +
			"`tolerationSeconds` is set\n" + `scheduling.tolerations[2]: Duplicate value: ` +
			`{"key":"k","operator":"Exists","tolerationSeconds":1}`})
	kindstest.CheckChanges(t, class(""),
		kindstest.Change[*nodev1.RuntimeClass]{Change: func(c *nodev1.RuntimeClass) {
			c.Handler = "g"
		}, Want: kindstest.InvalidText("handler", "g", "field is immutable")})
	if got := kindstest.PrintTable[*nodev1.RuntimeClass](t, class("")); got != "NAME|HANDLER|AGE\na|h|3h" {
		t.Error(got)
	}
}

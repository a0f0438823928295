package redact

import (
	"strings"
	"testing"
)

const planted = "pL4nted-S3cret"

func TestText(t *testing.T) {
	for _, s := range []string{
		"password=" + planted, `"password": "` + planted + `"`, `{"token":"` + planted + `","a":1}`,
		"DB_PASSWORD: " + planted, `msg="x" secret=` + planted + " next",
		"Authorization: Bearer " + planted, "authorization=Basic " + planted,
		"https://joe:" + planted + "@example.com/x", "postgres://app:" + planted + "@db/x?y",
		"--token " + planted, "--db-password '" + planted + "'", "--access-key=" + planted, "api_key=" + planted,
		"APIKEY: '" + planted + "'", "accessKey: " + planted,
		"-----BEGIN EC PRIVATE KEY-----\n" + planted + "\n-----END EC PRIVATE KEY-----",
		"-----BEGIN PRIVATE KEY-----\n" + planted,
		"eyJhbGciOiJSUzI1NiJ9." + planted + ".c2ln", "keelson1.node.abc." + planted, "age-secret-key-1" + planted,
		"ghp_" + planted, "https://s3/x?X-Amz-Signature=" + planted,
		`err="calling {\"password\":\"` + planted + `\"}"`, "Cookie: session=" + planted,
	} {
		if got := Text(s); strings.Contains(got, planted) {
			t.Errorf("%q becomes %q", s, got)
		}
	}
	for _, s := range []string{
		`time=2026-01-02T03:04:05Z level=INFO msg="role changed" from=follower to=leader reason="elected in term 2"`,
		"pod default/web-0 is on node w1 since 12:00:01", "keelson_store_keys 120",
		"image example.com:5000/app:v1@sha256:0123",
	} {
		if got := Text(s); got != s {
			t.Errorf("%q becomes %q: nothing in it is a secret", s, got)
		}
	}
}

func TestJSON(t *testing.T) {
	pod := `{"kind":"Pod","metadata":{"name":"web","labels":{"app":"web"},` +
		`"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{\"x\":\"` + planted + `\"}","vendor/x":"` +
		planted + `","keelson.dev/why":"full"},
"managedFields":[{"manager":"` + planted +
		`"}]},"spec":{"nodeName":"w1","containers":[{"name":"c","image":"app:1","command":["run","` + planted +
		`"],"args":["--x","` + planted + `"],
"env":[{"name":"A","value":"` + planted +
		`"},{"name":"B","valueFrom":{"secretKeyRef":{"name":"s","key":"k"}}}],"livenessProbe":{"exec":{"command":["` +
		planted + `"]},"httpGet":{"httpHeaders":[{"name":"X","value":"` + planted + `"}],"path":"/"}},
"lifecycle":{"preStop":{"exec":{"command":["` + planted +
		`"]}}}}],"ephemeralContainers":[{"env":[{"name":"C","value":"` + planted + `"}]}],
"volumes":[{"csi":{"driver":"d","volumeAttributes":{"k":"` + planted + `"}}}]},"status":{"message":"password=` +
		planted + `","phase":"Running"}}`
	got, err := JSON([]byte(`{"kind":"List","items":[` + pod + `,{"kind":"Deployment","spec":{"template":` + pod + `}},
{"kind":"Secret","metadata":{"name":"` + planted + `"},"data":{"k":"` + planted +
		`"}},{"kind":"ConfigMap","data":{"k":"` + planted + `"}},
{"kind":"StorageClass","parameters":{"k":"` + planted + `"}},{"data":{"k":"` + planted + `"},"stringData":{"k":"` +
		planted + `"}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(got), planted); n > 0 {
		t.Errorf("what was planted is there %d times:\n%s", n, got)
	}
	for _, want := range []string{`"nodeName": "w1"`, `"image": "app:1"`, `"name": "A"`, `"key": "k"`,
		`"keelson.dev/why": "full"`, `"phase": "Running"`, `"(2 words left out)"`} {
		if !strings.Contains(string(got), want) {
			t.Errorf("%s was taken out:\n%s", want, got)
		}
	}
	if _, err := JSON([]byte("{")); err == nil {
		t.Error("what is no JSON passes")
	}
}

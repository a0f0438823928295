package endpoints_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// randomValue returns a random value of words that occur in patches.
func randomValue(r *rand.Rand, depth int) any {
	words := []string{"metadata", "spec", "template", "containers", "name", "env", "ports", "containerPort", "labels",
		"$patch", "replace", "delete",
		"merge", "$setElementOrder/containers", "$deleteFromPrimitiveList/finalizers", "$retainKeys", "finalizers",
		"volumes", "strategy", "selector",
		"matchLabels", "image", "replicas", "tolerations", "ownerReferences", "uid", "$setElementOrder/env",
		"conditions", "status", "managedFields", "annotations"}
	word := func() string { return words[r.IntN(len(words))] }
	switch n := r.IntN(10); {
	case depth <= 0 || n < 3:
		return []any{nil, 1, -1.5, true, "", word(), "x"}[r.IntN(7)]
	case n < 5:
		out := make([]any, r.IntN(4))
		for i := range out {
			out[i] = randomValue(r, depth-1)
		}
		return out
	default:
		out := map[string]any{}
		for range r.IntN(5) {
			out[word()] = randomValue(r, depth-1)
		}
		return out
	}
}

// randomValueAtPath returns random values at existing paths, so that merging reaches them.
func randomValueAtPath(r *rand.Rand) any {
	pod := map[string]any{"containers": randomValue(r, 4), "volumes": randomValue(r, 3)}
	if r.IntN(2) == 0 {
		pod["containers"] = []any{map[string]any{"name": "c", "env": randomValue(r, 3), "ports": randomValue(r, 3)},
			randomValue(r, 3)}
	}
	return map[string]any{"metadata": randomValue(r, 3), "spec": map[string]any{
		"template": map[string]any{"metadata": randomValue(r, 3), "spec": pod}, "strategy": randomValue(r, 3),
		"selector": randomValue(r, 3)}, "status": randomValue(r, 3)}
}

// The API server responds to random patches of every type, and never panics.
func TestRandomPatches(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	client := r.AdminHTTP()
	deployment :=
		`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"d","finalizers":["a.b/c"]},"spec":{"selector":{"matchLabels":{"a":"b"}},
		"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"i","env":[{"name":"e","value":"v"}],"ports":[{"containerPort":80}]}]}}}}`
	const path = "/apis/apps/v1/namespaces/default/deployments"
	if got := r.Call(client, "POST", path, deployment, "Content-Type", "application/json"); got.Code != 201 {
		t.Fatalf("%d %s", got.Code, got.Body)
	}
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 1))
	codes := map[string]int{}
	for i := range 1500 {
		media := []string{"application/strategic-merge-patch+json", "application/strategic-merge-patch+json",
			"application/merge-patch+json", "application/apply-patch+yaml"}[i%4]
		var v any = randomValueAtPath(random)
		if random.IntN(4) == 0 {
			v = randomValue(random, 5)
		}
		if m, ok := v.(map[string]any); ok && strings.Contains(media, "apply") {
			m["apiVersion"], m["kind"] = "apps/v1", "Deployment"
		}
		body, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		query := "?dryRun=All"
		if strings.Contains(media, "apply") {
			query += "&force=true&fieldManager=m"
		}
		got := r.Call(client, "PATCH", path+"/d"+query, string(body), "Content-Type", media)
		codes[fmt.Sprint(media[12:17], " ", got.Code)]++
		if got.Code >= 500 {
			t.Errorf("seed %d, %s of %.600s: %d %.300s", seed, media, body, got.Code, got.Body)
		}
	}
	t.Logf("answers: %v", codes)
}

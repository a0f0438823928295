// Command openapi writes the OpenAPI documents of the built-in kinds into a folder: v2.json, and
// one file for each v3 document with "__" in place of "/". Package upstream compares the files with
// Kubernetes' documents.
package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/openapi"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "openapi: want one argument, the folder of the documents")
		os.Exit(2)
	}
	if err := writeDocuments(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "openapi:", err)
		os.Exit(1)
	}
}

// writeDocuments writes every document into dir.
func writeDocuments(dir string) error {
	spec := openapi.New(kinds.All(), "test")
	v2, err := getDocument(spec, "/openapi/v2")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "v2.json"), v2, 0o600); err != nil {
		return err
	}
	data, err := getDocument(spec, "/openapi/v3")
	if err != nil {
		return err
	}
	var index struct{ Paths map[string]json.RawMessage }
	if err := json.Unmarshal(data, &index); err != nil {
		return fmt.Errorf("decoding the index of the v3 documents: %w", err)
	}
	for path := range index.Paths {
		doc, err := getDocument(spec, "/openapi/v3/"+path)
		if err != nil {
			return err
		}
		name := strings.ReplaceAll(path, "/", "__") + "_openapi.json"
		if err := os.WriteFile(filepath.Join(dir, name), doc, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// getDocument returns the JSON document at a path.
func getDocument(spec *openapi.Spec, path string) ([]byte, error) {
	r := httptest.NewRequest(http.MethodGet, path, nil)
	r.Header.Set("Accept", "application/json")
	w := httptest.NewRecorder()
	if !spec.Serve(w, r) || w.Code != http.StatusOK {
		return nil, fmt.Errorf("GET %s: %d %s", path, w.Code, w.Body)
	}
	return w.Body.Bytes(), nil
}

// Command caller is a pod that asks the API who it is, again and again, with the token and the authorities that it finds in its
// files. It reads the token at each request and ca.crt at each connection, and tells over HTTP how often it was answered.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

const folder = "/var/run/secrets/kubernetes.io/serviceaccount/"

// told is what GET / answers.
type told struct {
	Calls, Failed int
	Authorities   int    // in ca.crt now
	First         string // of the failures
}

func verify(cs tls.ConnectionState) error {
	raw, err := os.ReadFile(folder + "ca.crt")
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(raw) {
		return errors.New("there is no authority in ca.crt")
	}
	_, err = cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool, DNSName: "kubernetes.default.svc"})
	return err
}

func ask(client *http.Client) error {
	token, err := os.ReadFile(folder + "token")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))+
		"/apis/authentication.k8s.io/v1/selfsubjectreviews", strings.NewReader(`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err == nil && (resp.StatusCode != http.StatusCreated || !strings.Contains(string(body), "system:serviceaccount:")) {
		err = fmt.Errorf("%s: %.300s", resp.Status, body)
	}
	return err
}

func main() {
	// A connection for each request: each meets the certificate of that moment.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, VerifyConnection: verify}}}
	var mu sync.Mutex
	var now told
	go func() {
		for range time.Tick(50 * time.Millisecond) {
			err := ask(client)
			mu.Lock()
			now.Calls++
			if err != nil {
				now.Failed++
				if now.First == "" {
					now.First = time.Now().Format(time.RFC3339Nano) + " " + err.Error()
				}
			}
			mu.Unlock()
		}
	}()
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		raw, _ := os.ReadFile(folder + "ca.crt")
		mu.Lock()
		defer mu.Unlock()
		now.Authorities = strings.Count(string(raw), "BEGIN CERTIFICATE")
		_ = json.NewEncoder(w).Encode(now)
	})
	log.Fatal(http.ListenAndServe(":8080", nil))
}

// Command caller is a pod that sends a SelfSubjectReview to the API every 50 ms, with its service
// account's token. It reads the token at each request and ca.crt at each connection. GET / returns
// the numbers of calls and failures as JSON.
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

// statusResponse is the response to GET /.
type statusResponse struct {
	Calls, Failed int
	Authorities   int    // certificates in the current ca.crt
	First         string // time and error of the first failure
}

func verifyServer(cs tls.ConnectionState) error {
	raw, err := os.ReadFile(folder + "ca.crt")
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(raw) {
		return errors.New("ca.crt contains no certificate authority")
	}
	_, err = cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool, DNSName: "kubernetes.default.svc"})
	return err
}

func callAPI(client *http.Client) error {
	token, err := os.ReadFile(folder + "token")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost,
		"https://"+net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))+
			"/apis/authentication.k8s.io/v1/selfsubjectreviews",
		strings.NewReader(`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`))
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
	if err == nil &&
		(resp.StatusCode != http.StatusCreated || !strings.Contains(string(body), "system:serviceaccount:")) {
		err = fmt.Errorf("%s: %.300s", resp.Status, body)
	}
	return err
}

func main() {
	// A new connection for each request verifies the server certificate that is current at that
	// moment.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true,
			VerifyConnection: verifyServer}}}
	var mu sync.Mutex
	var now statusResponse
	go func() {
		for range time.Tick(50 * time.Millisecond) {
			err := callAPI(client)
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

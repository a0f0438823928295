// Command wget fetches a URL, with the options that busybox's has: the example image of tools holds it in its place,
// because the static busybox of Debian crashes on -T, the option that every test of a network needs.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

type options struct {
	quiet, spider, showHeaders, insecure bool
	output, postData, agent              string
	headers                              []string
	timeout                              int // seconds; 0 = none
}

func main() {
	var o options
	f := pflag.NewFlagSet("wget", pflag.ContinueOnError)
	f.BoolVarP(&o.quiet, "quiet", "q", false, "say nothing but errors")
	f.BoolVar(&o.spider, "spider", false, "only check that the URL exists")
	f.BoolVarP(&o.showHeaders, "server-response", "S", false, "show the headers of the answer")
	f.BoolVar(&o.insecure, "no-check-certificate", false, "take any certificate")
	f.StringVarP(&o.output, "output-document", "O", "", "file for the answer; - is the standard output")
	f.StringVar(&o.postData, "post-data", "", "send this with POST")
	f.StringVarP(&o.agent, "user-agent", "U", "Wget", "name of the client")
	f.StringArrayVar(&o.headers, "header", nil, "NAME: VALUE, a header to send (repeatable)")
	f.IntVarP(&o.timeout, "timeout", "T", 900, "seconds until it gives up")
	err := f.Parse(os.Args[1:])
	if err == nil && f.NArg() != 1 {
		err = errors.New("one URL is needed: wget [-qS] [-O FILE] [-T SECONDS] URL")
	}
	if err == nil {
		err = fetch(o, f.Arg(0))
	}
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "wget:", err)
		os.Exit(1)
	}
}

func fetch(o options, address string) error {
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	ctx := context.Background()
	if o.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(o.timeout)*time.Second)
		defer cancel()
	}
	req, err := o.request(ctx, address)
	if err != nil {
		return err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: o.insecure} // -no-check-certificate is the user's word
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return explain(req.URL, err)
	}
	defer resp.Body.Close()
	if o.showHeaders {
		fmt.Fprintf(os.Stderr, "  %s %s\n", resp.Proto, resp.Status)
		_ = resp.Header.Write(os.Stderr)
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("server returned error: %s %s", resp.Proto, resp.Status)
	}
	if o.spider {
		return nil
	}
	out, name, err := o.open(req.URL)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, resp.Body)
	if err := errors.Join(err, out.Close()); err != nil {
		return explain(req.URL, err)
	}
	if !o.quiet && name != "-" {
		fmt.Fprintf(os.Stderr, "'%s' saved\n", name)
	}
	return nil
}

func (o options) request(ctx context.Context, address string) (*http.Request, error) {
	method, body := http.MethodGet, io.Reader(nil)
	switch {
	case o.postData != "":
		method, body = http.MethodPost, strings.NewReader(o.postData)
	case o.spider:
		method = http.MethodHead
	}
	req, err := http.NewRequestWithContext(ctx, method, address, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("User-Agent", o.agent)
	if body != nil {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for _, h := range o.headers {
		name, value, ok := strings.Cut(h, ":")
		if !ok {
			return nil, fmt.Errorf("--header %q: want NAME: VALUE", h)
		}
		if value = strings.TrimSpace(value); strings.EqualFold(name, "Host") {
			req.Host = value
		} else {
			req.Header.Set(name, value)
		}
	}
	return req, nil
}

func (o options) open(u *url.URL) (io.WriteCloser, string, error) {
	if o.output == "-" {
		return os.Stdout, "-", nil
	}
	name := o.output
	if name == "" {
		if name = path.Base(u.Path); name == "." || name == "/" {
			name = "index.html"
		}
	}
	f, err := os.Create(name)
	return f, name, err
}

// explain says in busybox's words what scripts look for: a name that does not resolve, a time that ran out.
func explain(u *url.URL, err error) error {
	var dns *net.DNSError
	var wrapped *url.Error
	switch {
	case errors.As(err, &dns):
		return fmt.Errorf("bad address '%s': %v", u.Hostname(), dns.Err)
	case errors.Is(err, context.DeadlineExceeded):
		return errors.New("download timed out")
	case errors.As(err, &wrapped):
		return fmt.Errorf("can't connect to remote host: %w", wrapped.Err)
	}
	return err
}
